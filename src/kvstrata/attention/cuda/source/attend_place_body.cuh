// Place of a block. Blocks: pieces by the warps of a block, heads, queries by tiles.

  const kvstrata::Lane lane;
  const int head = blockIdx.y, first_query = blockIdx.z * 4 * TILES;

  const int total_queries = q_shape[1], num_queries = min(4 * TILES, total_queries - first_query);

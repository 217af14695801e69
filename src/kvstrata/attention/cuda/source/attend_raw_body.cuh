// Attention of a block over one raw segment; @ is the number of the segment. k and v [1, heads, tokens, dim] may be
// views of longer arrays.

    const int piece = block * kvstrata::WARPS + lane.warp;
    const int start = min(piece, num_pieces@ - 1) * SIZE@, count = min(SIZE@, k@_shape[2] - start);
    const kvstrata::Source k_source{k@ + head * k@_strides[1], nullptr, nullptr, nullptr, nullptr, k@_strides[2]};
    const kvstrata::Source v_source{v@ + head * v@_strides[1], nullptr, nullptr, nullptr, nullptr, v@_strides[2]};
    kvstrata::Keys<kvstrata::RAW, K_DIM> k;
    kvstrata::Values<kvstrata::RAW, V_DIM> v;
    k.load(k_source, start, start + count - 1, lane);
    v.load(v_source, start, start + count - 1, lane);
    kvstrata::take_queries(shared.queries, q_row, q_strides[1], *scale, num_queries, lane);
    __syncthreads();
    if (piece < num_pieces@) {
      kvstrata::Asked<BF, kvstrata::RAW, K_DIM, TILES> asked;
      asked.take(shared.queries, num_queries, lane);
      kvstrata::attend<BF, kvstrata::RAW, kvstrata::RAW, K_DIM, V_DIM, TILES>(
          shared.scratch[lane.warp].exchange, asked, k, v, k_source, v_source, nullptr, start, count,
          num_queries, shared.found.sums[lane.warp], shared.found.stats[lane.warp][0], lane);
      shared.found.says(nullptr, lane);
    } else {
      shared.found.nothing(lane);
    }

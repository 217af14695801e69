// Weighted sums of planes. pieces0 as in attend_planes_body.cuh.

  const kvstrata::Lane lane;
  const int head = blockIdx.y, first_query = blockIdx.z * 4 * TILES;

  const int total_queries = p_shape[1], num_queries = min(4 * TILES, total_queries - first_query);

  const int block = blockIdx.x, num_pieces0 = pieces0_shape[0];
  
    const int piece = block * kvstrata::WARPS + lane.warp;
    const int* place = pieces0 + 5 * min(piece, num_pieces0 - 1);
    const int start = place[0], count = place[1];

    const long v_row = long(head) * v_scales_shape[1];
    const kvstrata::Source v_source{v_top + v_row * (V_DIM / 16), v_next + v_row * (V_DIM / 16),
        v_low + v_row * (V_DIM / 8), v_scales + v_row,
        v_means + (long(head) * v_means_shape[1] + place[3]) * V_DIM, 0};

  if (piece >= num_pieces0) return;
  const long num_tokens = v_scales_shape[1];
  const float* weights = p + (long(head) * total_queries + first_query) * num_tokens;
  float* out = sums + ((long(head) * num_pieces0 + piece) * total_queries + first_query) * V_DIM;
  kvstrata::mix<V_BITS, V_DIM, TILES>(
      v_source, weights, num_tokens, v_signs, start, count, num_queries, out, lane);

// Attention of a block over one encoded segment; @ is the number of the segment. pieces@ [n, 5]: first token, number
// of tokens, mean run of keys, mean run of values, and offset of the first token in the group that shares a mean. A
// warp without a piece still helps with the queries.

    const int piece = block * kvstrata::WARPS + lane.warp;
    const int* place = pieces@ + 5 * min(piece, num_pieces@ - 1);
    const int start = place[0], count = place[1];

    
    const long k@_row = long(head) * k@_scales_shape[1];
    const kvstrata::Source k@_source{k@_top + k@_row * (K_DIM / 16), k@_next + k@_row * (K_DIM / 16),
        k@_low + k@_row * (K_DIM / 8), k@_scales + k@_row,
        k@_means + (long(head) * k@_means_shape[1] + place[2]) * K_DIM, 0};

    const long v@_row = long(head) * v@_scales_shape[1];
    const kvstrata::Source v@_source{v@_top + v@_row * (V_DIM / 16), v@_next + v@_row * (V_DIM / 16),
        v@_low + v@_row * (V_DIM / 8), v@_scales + v@_row,
        v@_means + (long(head) * v@_means_shape[1] + place[3]) * V_DIM, 0};

    kvstrata::Keys<K_BITS@, K_DIM> k;
    kvstrata::Values<V_BITS@, V_DIM> v;
    k.load(k@_source, start, start + count - 1, lane);
    v.load(v@_source, start, start + count - 1, lane);
    kvstrata::take_queries(shared.queries, q_row, q_strides[1], *scale, num_queries, lane);
    kvstrata::rotate_queries(shared.rotated, shared.queries, k_signs, num_queries, lane);
    __syncthreads();
    if (piece < num_pieces@) {
      kvstrata::Asked<false, K_BITS@, K_DIM, TILES> asked;
      asked.take(shared.rotated, num_queries, lane);
      float* found = shared.found.sums[lane.warp];
      // Until the piece is done, what it finds has no need of its memory.
      float* shares = K_PAIRS@ > 0 ? found : nullptr;
      if constexpr (K_PAIRS@ > 0) {
        using Rotation = kvstrata::Rotation<K_PAIRS@, K_FIRST@, K_INTERLEAVED@>;
        kvstrata::compute_rotated_shares(
            Rotation{}, shared.queries, k@_source.mean, rotations@, place[4], num_queries,
            shared.scratch[lane.warp].factors, shares, lane);
      } else {
        asked.centre(shared.queries, k@_source.mean, num_queries, lane);
      }
      kvstrata::attend<false, K_BITS@, V_BITS@, K_DIM, V_DIM, TILES>(
          shared.scratch[lane.warp].exchange, asked, k, v, k@_source, v@_source, shares, start, count,
          num_queries, found, shared.found.stats[lane.warp][0], lane);
      shared.found.says(v@_source.mean, lane);
    } else {
      shared.found.nothing(lane);
    }

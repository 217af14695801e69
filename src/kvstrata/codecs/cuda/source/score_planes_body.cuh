// Scores of queries by planes. pieces0 as in attend_planes_body.cuh.

  const kvstrata::Lane lane;
  const int head = blockIdx.y, first_query = blockIdx.z * 4 * TILES;

  const int total_queries = q_shape[1], num_queries = min(4 * TILES, total_queries - first_query);

  __shared__ kvstrata::Queries<K_DIM, TILES> queries, rotated;
  const int block = blockIdx.x, num_pieces0 = pieces0_shape[0];
  
    const int piece = block * kvstrata::WARPS + lane.warp;
    const int* place = pieces0 + 5 * min(piece, num_pieces0 - 1);
    const int start = place[0], count = place[1];

    const long k_row = long(head) * k_scales_shape[1];
    const kvstrata::Source k_source{k_top + k_row * (K_DIM / 16), k_next + k_row * (K_DIM / 16),
        k_low + k_row * (K_DIM / 8), k_scales + k_row,
        k_means + (long(head) * k_means_shape[1] + place[2]) * K_DIM, 0};

  const long row = long(head) * total_queries + first_query;
  kvstrata::take_queries(queries, q + row * K_DIM, K_DIM, 1.0f, num_queries, lane);
  kvstrata::rotate_queries(rotated, queries, k_signs, num_queries, lane);
  __syncthreads();
  if (piece >= num_pieces0) return;
  kvstrata::Asked<false, K_BITS, K_DIM, TILES> asked;
  asked.take(rotated, num_queries, lane);
  float* shares = nullptr;
  if constexpr (K_PAIRS > 0) {
    __shared__ float rotated_shares[kvstrata::WARPS][4 * TILES * kvstrata::SHARES];
    __shared__ kvstrata::Factors<K_DIM, TILES> factors[kvstrata::WARPS];
    shares = rotated_shares[lane.warp];
    using Rotation = kvstrata::Rotation<K_PAIRS, K_FIRST, K_INTERLEAVED>;
    kvstrata::compute_rotated_shares(
        Rotation{}, queries, k_source.mean, rotations, place[4], num_queries, factors[lane.warp], shares, lane);
  } else {
    asked.centre(queries, k_source.mean, num_queries, lane);
  }
  const long num_tokens = k_scales_shape[1];
  kvstrata::score(asked, k_source, shares, start, count, num_queries, scores + row * num_tokens, num_tokens, lane);

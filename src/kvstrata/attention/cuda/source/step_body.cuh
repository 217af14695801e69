// A decode step over addresses: see step.cuh. `facts`: the scale, whether there are sinks, signs of keys and of
// values.

  __shared__ kvstrata::Shared<K_DIM, V_DIM, TILES> shared;
  __shared__ bool is_last;
  const kvstrata::Lane lane;
  const int num_heads = k_new_shape[1], num_queries = q_shape[1] / num_heads;
  const int row = blockIdx.y / num_heads, head = blockIdx.y % num_heads;
  const int* place = places + kvstrata::ENTRY * row;
  const int num_known = place[5], num_pieces = num_known + (place[2] + place[3] - 1) / place[3];
  const int num_blocks = (num_pieces + kvstrata::WARPS - 1) / kvstrata::WARPS;
  if (blockIdx.x >= num_blocks) return;
  const int piece = blockIdx.x * kvstrata::WARPS + lane.warp;
  // A warp that has no piece still helps with the queries.
  const bool has_piece = piece < num_pieces;
  const int mine = has_piece ? piece : num_pieces - 1;
  const kvstrata::Work work = kvstrata::work_of<K_DIM, V_DIM>(
      place, pieces + kvstrata::ENTRY * (place[4] + mine), mine - num_known, kinds,
      reinterpret_cast<const unsigned long long*>(addresses), head);
  const bool has_coded_keys = has_piece && work.k_bits != kvstrata::RAW;
  if (has_piece && mine >= num_known && place[1] >= work.start && place[1] < work.start + work.count) {
    kvstrata::put_token<K_DIM>(work.k, place[1], k_new + long(blockIdx.y) * K_DIM, lane);
    kvstrata::put_token<V_DIM>(work.v, place[1], v_new + long(blockIdx.y) * V_DIM, lane);
    __syncwarp();
  }
  const auto* asked = q + long(blockIdx.y) * num_queries * K_DIM;
  kvstrata::take_queries(shared.queries, asked, K_DIM, facts[0], num_queries, lane);
  if (__syncthreads_or(has_coded_keys)) {
    kvstrata::rotate_queries(shared.rotated, shared.queries, facts + 2, num_queries, lane);
    __syncthreads();
  }
  float* shares = nullptr;
  if (has_coded_keys && work.rotation.pairs > 0) {
    // Until the piece is done, what it finds has no need of its memory.
    shares = shared.found.sums[lane.warp];
    kvstrata::compute_rotated_shares(
        work.rotation, shared.queries, work.k.mean, work.table, work.offset, num_queries,
        shared.scratch[lane.warp].factors, shares, lane);
  }
  if (!has_piece) {
    shared.found.nothing(lane);
  } else if (work.k_bits == kvstrata::RAW) {
    kvstrata::attend_values<BF, kvstrata::RAW, K_DIM, V_DIM, TILES>(shared, work, shares, num_queries, lane);
  } else if (work.k_bits == 8) {
    kvstrata::attend_values<BF, 8, K_DIM, V_DIM, TILES>(shared, work, shares, num_queries, lane);
  } else if (work.k_bits == 4) {
    kvstrata::attend_values<BF, 4, K_DIM, V_DIM, TILES>(shared, work, shares, num_queries, lane);
  } else {
    kvstrata::attend_values<BF, 2, K_DIM, V_DIM, TILES>(shared, work, shares, num_queries, lane);
  }
  const long first = long(blockIdx.y) * gridDim.x * num_queries, found = first + blockIdx.x * num_queries;
  if (has_piece) shared.found.says(work.v.mean, lane);
  shared.found.merge(num_queries, facts + 2 + K_DIM, sums + found * V_DIM, stats + 2 * found);
  __threadfence();
  __syncthreads();
  unsigned* counter = const_cast<unsigned*>(counters) + blockIdx.y;
  if (threadIdx.x == 0) is_last = atomicAdd(counter, 1u) + 1 == num_blocks;
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  if (threadIdx.x == 0) *counter = 0;
  kvstrata::combine_found(
      shared.found, sums + first * V_DIM, stats + 2 * first, num_blocks, num_queries,
      facts[1] != 0 ? sinks + head * num_queries : nullptr, out + long(blockIdx.y) * num_queries * V_DIM);

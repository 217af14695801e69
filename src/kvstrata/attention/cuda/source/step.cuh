// Decode step of a batch: each row writes its new token into its buffer and attends over its segments and the buffer.
//
// Cached KV is read through tables: `addresses` has the addresses of each segment's arrays, `kinds` their storage form,
// `pieces` the tokens of a segment that a warp takes, `places` the slots of the new tokens. So one kernel serves any
// number of rows and segments, of any bits. A block has pieces of one row, of any of its segments.
//
// places [rows][8]: number of the segment with the row's own buffer, the new token's place in it, its tokens with the
// new one, how many of them to a piece, the first of the row's pieces, how many they are.
// pieces [n][8]: segment, first token, how many, mean run of keys, mean run of values, where in its group the first is.
// kinds [segments][8]: bits of keys and of values (16: raw), tokens of the arrays, mean runs of keys, of values, and
// the RoPE rotation of the keys' means: pairs, first dim, whether a pair's dims are neighbours.
// addresses [segments][12]: of keys, then of values: values (or top crumbs), next, low, scales, means; then the table
// of the rotation.

namespace kvstrata {

constexpr int ENTRY = 8, ADDRESSES = 12;

// Work of a warp: one piece.
struct Work {
  Source k, v;
  int k_bits, v_bits, start, count, offset;
  AnyRotation rotation;
  const float* table;  // of the rotation
};

template <typename T>
__device__ __forceinline__ const T* address(unsigned long long number) {
  return reinterpret_cast<const T*>(number);
}

template <int DIM>
__device__ __forceinline__ Source source_of(
    const unsigned long long* at, int bits, int head, long num_tokens, int num_mean_runs, int mean_run) {
  const long row = head * num_tokens;
  if (bits == RAW) return {address<unsigned short>(at[0]) + row * DIM, nullptr, nullptr, nullptr, nullptr, DIM};
  return {address<unsigned>(at[0]) + row * (DIM / 16), address<unsigned>(at[1]) + row * (DIM / 16),
          address<unsigned>(at[2]) + row * (DIM / 8),  address<__half>(at[3]) + row,
          address<__half>(at[4]) + (long(head) * num_mean_runs + mean_run) * DIM, 0};
}

// `own`: number of the piece in the row's own buffer; below 0: the piece is in `known`.
template <int K_DIM, int V_DIM>
__device__ __forceinline__ Work work_of(
    const int* place, const int* known, int own, const int* kinds, const unsigned long long* addresses, int head) {
  const int segment = own < 0 ? known[0] : place[0];
  const int* kind = kinds + ENTRY * segment;
  const unsigned long long* at = addresses + ADDRESSES * segment;
  Work work;
  work.start = own < 0 ? known[1] : own * place[3];
  work.count = own < 0 ? known[2] : min(place[3], place[2] - work.start);
  work.offset = own < 0 ? known[5] : 0;
  work.k_bits = kind[0], work.v_bits = kind[1];
  work.k = source_of<K_DIM>(at, kind[0], head, kind[2], kind[3], own < 0 ? known[3] : 0);
  work.v = source_of<V_DIM>(at + 5, kind[1], head, kind[2], kind[4], own < 0 ? known[4] : 0);
  work.rotation = {kind[5], kind[6], kind[7] != 0};
  work.table = address<float>(at[10]);
  return work;
}

// By the warp whose piece has the new token's place. MLX does not know, and must not, or it would copy.
template <int DIM, typename T>
__device__ __forceinline__ void put_token(const Source& to, int place, const T* from, const Lane& at) {
  auto* values = static_cast<unsigned short*>(const_cast<void*>(to.values)) + long(place) * DIM;
  const auto* bits = reinterpret_cast<const unsigned short*>(from);
  for (int d = at.lane; d < DIM; d += 32) values[d] = bits[d];
}

// Each side of a piece is raw or coded. `shares`: of a RoPE-aware mean of the keys; nullptr: there is none.
template <bool BF, int K_BITS, int V_BITS, int K_DIM, int V_DIM, int TILES>
__device__ __forceinline__ void attend_piece(
    Shared<K_DIM, V_DIM, TILES>& shared, const Work& work, const float* shares, int num_queries, const Lane& at) {
  const Source &keys = work.k, &values = work.v;
  const int start = work.start, count = work.count;
  Keys<K_BITS, K_DIM> k;
  Values<V_BITS, V_DIM> v;
  k.load(keys, start, start + count - 1, at);
  v.load(values, start, start + count - 1, at);
  Asked<BF && K_BITS == RAW, K_BITS, K_DIM, TILES> asked;
  asked.take(K_BITS == RAW ? shared.queries : shared.rotated, num_queries, at);
  if (K_BITS != RAW && shares == nullptr) asked.centre(shared.queries, keys.mean, num_queries, at);
  attend<BF && V_BITS == RAW, K_BITS, V_BITS, K_DIM, V_DIM, TILES>(
      shared.scratch[at.warp].exchange, asked, k, v, keys, values, shares, start, count, num_queries,
      shared.found.sums[at.warp], shared.found.stats[at.warp][0], at);
}

template <bool BF, int K_BITS, int K_DIM, int V_DIM, int TILES>
__device__ __forceinline__ void attend_values(
    Shared<K_DIM, V_DIM, TILES>& shared, const Work& work, const float* shares, int num_queries, const Lane& at) {
  if (work.v_bits == RAW) {
    attend_piece<BF, K_BITS, RAW, K_DIM, V_DIM, TILES>(shared, work, shares, num_queries, at);
  } else if (work.v_bits == 8) {
    attend_piece<BF, K_BITS, 8, K_DIM, V_DIM, TILES>(shared, work, shares, num_queries, at);
  } else if (work.v_bits == 4) {
    attend_piece<BF, K_BITS, 4, K_DIM, V_DIM, TILES>(shared, work, shares, num_queries, at);
  } else {
    attend_piece<BF, K_BITS, 2, K_DIM, V_DIM, TILES>(shared, work, shares, num_queries, at);
  }
}

// The last block of a row's head combines the results of all blocks: sums and stats [blocks, queries, ...]. The memory
// of its own results is reused for the blocks' weights, and then for partial sums.
template <int V_DIM, int TILES, typename T>
__device__ __forceinline__ void combine_found(
    Found<V_DIM, TILES>& memory, const float* sums, const float* stats, int num_blocks, int num_queries,
    const float* sinks, T* out) {
  constexpr int THREADS = 32 * WARPS, ROOM = Found<V_DIM, TILES>::ROOM;
  __shared__ float largest[4 * TILES], total[4 * TILES];
  const Lane at;
  for (int query = at.warp; query < num_queries; query += WARPS) {
    const float sink = sinks == nullptr ? -INFINITY : sinks[query];
    float top = sink, sum = 0;
    for (int b = at.lane; b < num_blocks; b += 32) top = fmaxf(top, __ldcg(stats + 2 * (b * num_queries + query)));
    top = warp_max(top);
    for (int b = at.lane; b < num_blocks; b += 32) {
      const float2 of_block = __ldcg(reinterpret_cast<const float2*>(stats) + b * num_queries + query);
      sum += exp2f((of_block.x - top) * LOG2_E) * of_block.y;
    }
    sum = warp_sum(sum);
    if (at.lane == 0) largest[query] = top, total[query] = sum + exp2f((sink - top) * LOG2_E);
  }
  __syncthreads();
  auto weight_of = [&](int i) { return exp2f((__ldcg(stats + 2 * i) - largest[i % num_queries]) * LOG2_E); };
  // Weights beyond this memory are computed again.
  const int num_weights = min(num_blocks * num_queries, (WARPS - 1) * ROOM);
  float *weights = memory.sums[0], *partials = memory.sums[WARPS - 1];
  for (int i = threadIdx.x; i < num_weights; i += THREADS) weights[i] = weight_of(i);
  __syncthreads();
  // Each thread has four dims; where threads are left, each has some of the blocks.
  const int num_fours = num_queries * V_DIM / 4, num_partials = max(1, THREADS / num_fours);
  for (int four = threadIdx.x; four < num_fours * num_partials; four += THREADS) {
    const int place = four % num_fours, query = place / (V_DIM / 4);
    float4 sum = {0, 0, 0, 0};
#pragma unroll 8
    for (int b = four / num_fours; b < num_blocks; b += num_partials) {
      const int i = b * num_queries + query;
      const float weight = i < num_weights ? weights[i] : weight_of(i);
      const float4 found = __ldcg(reinterpret_cast<const float4*>(sums) + long(b) * num_fours + place);
      sum.x += weight * found.x, sum.y += weight * found.y, sum.z += weight * found.z, sum.w += weight * found.w;
    }
    const float inverse = 1 / total[query];
    const float values[4] = {sum.x * inverse, sum.y * inverse, sum.z * inverse, sum.w * inverse};
#pragma unroll
    for (int d = 0; d < 4; ++d) {
      if (num_partials == 1) {
        out[4 * place + d] = static_cast<T>(values[d]);
      } else {
        partials[4 * four + d] = values[d];
      }
    }
  }
  if (num_partials == 1) return;
  __syncthreads();
  for (int i = threadIdx.x; i < 4 * num_fours; i += THREADS) {
    float sum = 0;
    for (int p = 0; p < num_partials; ++p) sum += partials[4 * num_fours * p + i];
    out[i] = static_cast<T>(sum);
  }
}

}  // namespace kvstrata

// Decoding of codes to vectors in the basis of the model: a thread has 16 dims, so that most of the rotation is within
// threads.

namespace kvstrata {

// Mean run of a token. Most mean runs have 256 tokens, so a first guess is right or next to the right one.
__device__ __forceinline__ int mean_run_of(const int* starts, int num_mean_runs, int token) {
  int mean_run = token < starts[1] ? 0 : min(1 + (token - starts[1]) / 256, num_mean_runs - 1);
  while (starts[mean_run] > token) --mean_run;
  while (starts[mean_run + 1] <= token) ++mean_run;
  return mean_run;
}

// A byte of `codes` as float32, in units. 0x4700bb00 is 32768 + bb.
template <int BITS>
__device__ __forceinline__ float to_float(unsigned codes, int byte) {
  return __uint_as_float(permute(codes, 0x47000000, 0x7404 + 16 * byte)) - (32768.0f + MIDDLE - HALF<BITS>);
}

__device__ __forceinline__ void store(float* to, const float (&x)[16]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    reinterpret_cast<float4*>(to)[i] = make_float4(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);
  }
}

template <bool BF>
__device__ __forceinline__ void store_halves(void* to, const float (&x)[16]) {
  unsigned words[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) words[i] = to_bits<BF>(x[2 * i]) | unsigned(to_bits<BF>(x[2 * i + 1])) << 16;
  reinterpret_cast<uint4*>(to)[0] = make_uint4(words[0], words[1], words[2], words[3]);
  reinterpret_cast<uint4*>(to)[1] = make_uint4(words[4], words[5], words[6], words[7]);
}

__device__ __forceinline__ void store(__half* to, const float (&x)[16]) { store_halves<false>(to, x); }
__device__ __forceinline__ void store(__nv_bfloat16* to, const float (&x)[16]) { store_halves<true>(to, x); }

// 16 dims of a vector, in units and not rotated back. `from`: their place, in sixteens.
template <int BITS>
__device__ __forceinline__ void load_codes(
    const unsigned* top, const unsigned* next, const unsigned* low, long from, float (&x)[16]) {
  unsigned codes[4];
  uint2 nibbles = BITS == 8 ? __ldg(reinterpret_cast<const uint2*>(low) + from) : make_uint2(0, 0);
  unpack<BITS>(__ldg(top + from), BITS >= 4 ? __ldg(next + from) : 0, nibbles.x, nibbles.y, codes);
#pragma unroll
  for (int i = 0; i < 16; ++i) x[i] = to_float<BITS>(codes[i % 4], i / 4);
}

// 16 dims of a vector as above, for bits that are known when a kernel runs: fewer kernels are compiled.
__device__ __forceinline__ void load_codes(
    int bits, const unsigned* top, const unsigned* next, const unsigned* low, long from, float (&x)[16]) {
  if (bits == 8) {
    load_codes<8>(top, next, low, from, x);
  } else if (bits == 4) {
    load_codes<4>(top, next, low, from, x);
  } else {
    load_codes<2>(top, next, low, from, x);
  }
}

// Scales 16 dims that are rotated back, from dim `dim` on, and adds their mean. `place`: of the token in its group.
template <typename ROTATION, int DIM>
__device__ __forceinline__ void add_mean(
    float (&x)[16], float scale, const __half* mean, const float* signs, const float* angles, int dim, int place) {
  float factor = scale * UNIT * rsqrtf(float(DIM & -DIM));
  auto mean_at = [&](int d) { return __half2float(mean[d]); };
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    float centre = ROTATION::rotated(mean_at, dim + i, angles, place);
    x[i] = x[i] * (factor * signs[dim + i]) + centre;
  }
}

// Tokens [start, start + count) of each row -> out [rows, count, DIM]. One thread for each 16 dims.
template <typename ROTATION, typename T, int DIM>
__device__ __forceinline__ void decode(
    int bits, const unsigned* top, const unsigned* next, const unsigned* low, const __half* scales, const __half* means,
    const float* signs, const float* angles, int offset, const int* starts, int num_mean_runs, long index,
    long num_units, int num_tokens, int start, int count, T* out) {
  constexpr int UNITS = DIM / 16;
  bool is_ours = index < num_units;
  long unit = is_ours ? index : num_units - 1;  // all lanes take part in the rotation
  long vector = unit / UNITS;
  int row = vector / count, token = start + vector % count, dim = unit % UNITS * 16;
  long at = long(row) * num_tokens + token;
  float x[16];
  load_codes(bits, top, next, low, at * UNITS + dim / 16, x);
  rotate_sixteen<DIM>(x);
  const __half* mean = means + (long(row) * num_mean_runs + mean_run_of(starts, num_mean_runs, token)) * DIM;
  add_mean<ROTATION, DIM>(x, __half2float(scales[at]), mean, signs, angles, dim, (offset + token) % GROUP);
  if (is_ours) store(out + unit * 16, x);
}

// Consecutive ranges -> out [rows, total, DIM], decoded as by `decode`; raw vectors as they are.
// ranges [n][8]: first token in `out`, first token of the range, tokens of its arrays, bits (16: raw, 0: in `own`),
// mean runs, where in `starts` they begin, where token 0 is in its group, the row of addresses.
template <typename ROTATION, typename T, int DIM>
__device__ __forceinline__ void decode_ranges(
    const int* ranges, int num_ranges, const int* starts, const unsigned long long* addresses, const T* own,
    const float* signs, const float* angles, long index, long num_units, int total, T* out) {
  constexpr int UNITS = DIM / 16, ENTRY = 8, ADDRESSES = 12;
  bool is_ours = index < num_units;
  long unit = is_ours ? index : num_units - 1;
  long vector = unit / UNITS;
  int row = vector / total, place = vector % total, dim = unit % UNITS * 16;
  int first = 0, last = num_ranges - 1;
  while (first < last) {
    int middle = (first + last + 1) / 2;
    if (ranges[ENTRY * middle] <= place) first = middle;
    else last = middle - 1;
  }
  const int* range = ranges + ENTRY * first;
  const unsigned long long* arrays = addresses + ADDRESSES * range[7];
  auto array = [&](int i) { return reinterpret_cast<const unsigned*>(arrays[i]); };
  int bits = range[3], token = range[1] + place - range[0];
  long at = long(row) * range[2] + token, from = at * UNITS + dim / 16;
  bool is_raw = bits == 0 || bits == 16;
  uint4 raw[2];
  float x[16] = {};
  if (is_raw) {
    const void* values = bits == 0 ? static_cast<const void*>(own) : array(0);
    const uint4* words = static_cast<const uint4*>(values) + 2 * from;
    raw[0] = words[0], raw[1] = words[1];
  } else {
    load_codes(bits, array(0), array(1), array(2), from, x);
  }
  rotate_sixteen<DIM>(x);  // by all lanes
  if (is_raw) {
    uint4* to = reinterpret_cast<uint4*>(out + unit * 16);
    if (is_ours) to[0] = raw[0], to[1] = raw[1];
    return;
  }
  int mean_run = mean_run_of(starts + range[5], range[4], token);
  const __half* mean = reinterpret_cast<const __half*>(arrays[4]) + (long(row) * range[4] + mean_run) * DIM;
  float scale = __half2float(reinterpret_cast<const __half*>(arrays[3])[at]);
  add_mean<ROTATION, DIM>(x, scale, mean, signs, angles, dim, (range[6] + token) % GROUP);
  if (is_ours) store(out + unit * 16, x);
}

}  // namespace kvstrata

// Codes to vectors in the basis of the model: a thread has 16 dims, so that most of the rotation is within threads.

namespace kvstrata {

// The segment of a token. Most have 256 tokens, so a guess is right or next to it.
__device__ __forceinline__ int segment_of(const int* starts, int num_segments, int token) {
  int segment = token < starts[1] ? 0 : min(1 + (token - starts[1]) / 256, num_segments - 1);
  while (starts[segment] > token) --segment;
  while (starts[segment + 1] <= token) ++segment;
  return segment;
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

// Tokens [start, start + count) of each row -> out [rows, count, DIM]. One thread for each 16 dims.
template <typename TURN, typename T, int BITS, int DIM>
__device__ __forceinline__ void decode(
    const unsigned* top, const unsigned* next, const unsigned* low, const __half* scales, const __half* means,
    const float* signs, const float* angles, int offset, const int* starts, int num_segments, long index,
    long num_units, int num_tokens, int start, int count, T* out) {
  constexpr int UNITS = DIM / 16;
  bool is_ours = index < num_units;
  long unit = is_ours ? index : num_units - 1;  // all lanes take part in the rotation
  long vector = unit / UNITS;
  int row = vector / count, token = start + vector % count, dim = unit % UNITS * 16;
  long from = (long(row) * num_tokens + token) * UNITS + dim / 16;
  unsigned codes[4];
  uint2 nibbles = BITS == 8 ? __ldg(reinterpret_cast<const uint2*>(low) + from) : make_uint2(0, 0);
  unpack<BITS>(__ldg(top + from), BITS >= 4 ? __ldg(next + from) : 0, nibbles.x, nibbles.y, codes);
  float x[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) x[i] = to_float<BITS>(codes[i % 4], i / 4);
  rotate_sixteen<DIM>(x);
  float factor = __half2float(scales[long(row) * num_tokens + token]) * UNIT * rsqrtf(float(DIM & -DIM));
  const __half* mean = means + (long(row) * num_segments + segment_of(starts, num_segments, token)) * DIM;
  auto mean_at = [&](int d) { return __half2float(mean[d]); };
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    float centre = TURN::turned(mean_at, dim + i, angles, (offset + token) % GROUP);
    x[i] = x[i] * (factor * signs[dim + i]) + centre;
  }
  if (is_ours) store(out + unit * 16, x);
}

}  // namespace kvstrata

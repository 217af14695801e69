// Vectors in registers: 16 dims of a token to a lane, for each form of storage.
//
// KIND: 32, 16 or 17 for raw float32, float16 or bfloat16; 8, 4 or 2 for planes of so many bits. Values of planes come
// as code - half of the codes; what is missing to a value, the other half of a step and the scale, is added by the
// caller. A register r holds dim KV_DIM_OF(r) of the 16: the order in which bytes come out of the planes.

#define KV_DIM_OF(r) (4 * (((r) & 3) == 1 ? 2 : ((r) & 3) == 2 ? 1 : ((r) & 3)) + ((r) >> 2))
#define KV_REGISTER_OF(dim) (4 * ((dim) & 3) + (((dim) >> 2) == 1 ? 2 : ((dim) >> 2) == 2 ? 1 : ((dim) >> 2)))
#define KV_IS_CODED(kind) ((kind) <= 8)

// Tokens that a lane asks memory for before it computes.
template <int KIND>
struct kv_form {
  enum { AHEAD = KIND == 32 ? 2 : KIND >= 8 ? 4 : 8, HALF_OF_CODES = KIND <= 8 ? 1 << (KIND <= 8 ? KIND - 1 : 0) : 1 };
};

// How the lanes share vectors of DIM: LANES of them have a token, USED of these something to do.
template <int DIM>
struct kv_share {
  enum {
    USED = DIM / 16,
    LANES = DIM <= 16 ? 1 : DIM <= 32 ? 2 : DIM <= 64 ? 4 : DIM <= 128 ? 8 : 16,
    TOKENS = 32 / LANES,
    BLOCK = DIM & -DIM  // of the rotation
  };
};

// Addresses of the vectors of one head, and the mean of one mean run.
struct kv_source {
  const KV_DEVICE kv_uint* words;  // raw vectors, or plane `top`
  const KV_DEVICE kv_uint* next;
  const KV_DEVICE kv_uint* low;
  const KV_DEVICE kv_half* scales;
  const KV_DEVICE kv_half* mean;
};

struct kv_packed {
  kv_uint words[16];
  float scale;
};

template <int KIND, int DIM>
KV_FN void kv_fetch(const KV_LOCAL kv_source& source, int token, int unit, KV_LOCAL kv_packed& packed) {
  const kv_long at = kv_long(token) * (DIM / 16) + unit;
  if (KIND >= 16) {
    const KV_DEVICE kv_uint4* vector = (const KV_DEVICE kv_uint4*)source.words + at * (KIND == 32 ? 4 : 2);
    KV_UNROLL
    for (int i = 0; i < (KIND == 32 ? 4 : 2); ++i) {
      const kv_uint4 four = vector[i];
      packed.words[4 * i] = four.x;
      packed.words[4 * i + 1] = four.y;
      packed.words[4 * i + 2] = four.z;
      packed.words[4 * i + 3] = four.w;
    }
    return;
  }
  packed.words[0] = source.words[at];
  if (KIND >= 4) packed.words[1] = source.next[at];
  if (KIND == 8) {
    const kv_uint2 two = ((const KV_DEVICE kv_uint2*)source.low)[at];
    packed.words[2] = two.x;
    packed.words[3] = two.y;
  }
  packed.scale = float(source.scales[token]) * (1.0f / float(kv_form<KIND>::HALF_OF_CODES));
}

template <int KIND>
KV_FN void kv_spread(const KV_LOCAL kv_packed& packed, KV_LOCAL float (&values)[16]) {
  if (KIND >= 16) {
    KV_UNROLL
    for (int i = 0; i < 8; ++i) {
      float first, second;
      if (KIND == 32) {
        first = kv_as_float(packed.words[2 * i]);
        second = kv_as_float(packed.words[2 * i + 1]);
      } else if (KIND == 16) {
        first = kv_low_half(packed.words[i]);
        second = kv_high_half(packed.words[i]);
      } else {
        first = kv_as_float(packed.words[i] << 16);
        second = kv_as_float(packed.words[i] & 0xFFFF0000u);
      }
      values[KV_REGISTER_OF(2 * i)] = first;
      values[KV_REGISTER_OF(2 * i + 1)] = second;
    }
    return;
  }
  const kv_uint top = kv_swap(packed.words[0]), next = KIND >= 4 ? kv_swap(packed.words[1]) : 0u;
  KV_UNROLL
  for (int j = 0; j < 4; ++j) {
    kv_uint codes = (top >> (2 * j)) & 0x03030303u;
    if (KIND >= 4) codes = (codes << 2) | ((next >> (2 * j)) & 0x03030303u);
    if (KIND == 8) {
      const kv_uint low = (packed.words[2] >> (4 * j)) & 0x000F000Fu, high = (packed.words[3] >> (4 * j)) & 0x000F000Fu;
      codes = (codes << 4) | low | (high << 8);
    }
    KV_UNROLL
    for (int b = 0; b < 4; ++b) {
      values[4 * j + b] = kv_byte(codes, b) - (8388608.0f + float(kv_form<KIND>::HALF_OF_CODES));
    }
  }
}

// Sum over lanes whose numbers differ in bits below `end` and not below `first`.
KV_FN float kv_sum_over(float x, int first, int end) {
  for (int mask = first; mask < end; mask <<= 1) x += kv_shuffle_xor(x, mask);
  return x;
}

KV_FN float kv_sum(float x) { return kv_sum_over(x, 1, 32); }

KV_FN float kv_max(float x) {
  for (int mask = 1; mask < 32; mask <<= 1) x = kv_larger(x, kv_shuffle_xor(x, mask));
  return x;
}

// The Hadamard matrix of BLOCK, not divided by its root, on `count` numbers that the lanes share.
template <int BLOCK>
KV_FN void kv_hadamard(KV_SHARED float* numbers, int count, int lane) {
  for (int half_size = 1; half_size < BLOCK; half_size <<= 1) {
    for (int i = lane; i < count / 2; i += 32) {
      const int at = (i / half_size) * 2 * half_size + i % half_size;
      const float a = numbers[at], b = numbers[at + half_size];
      numbers[at] = a + b;
      numbers[at + half_size] = a - b;
    }
    kv_barrier();
  }
}

// The Hadamard matrix on vectors in registers. Registers have the dims in another order, which only swaps bits of their
// numbers, so the product is the same.
template <int BLOCK>
KV_FN void kv_hadamard_registers(KV_LOCAL float (&values)[16], int lane) {
  KV_UNROLL
  for (int bit = 1; bit < 16; bit <<= 1) {
    KV_UNROLL
    for (int r = 0; r < 16; ++r) {
      if (r & bit) continue;
      const float a = values[r], b = values[r | bit];
      values[r] = a + b;
      values[r | bit] = a - b;
    }
  }
  for (int mask = 1; mask < BLOCK / 16; mask <<= 1) {
    KV_UNROLL
    for (int r = 0; r < 16; ++r) {
      const float other = kv_shuffle_xor(values[r], mask);
      values[r] = lane & mask ? other - values[r] : values[r] + other;
    }
  }
}

// 1 / sqrt(BLOCK), a power of two.
template <int BLOCK>
KV_FN float kv_hadamard_scale() {
  float scale = 1.0f;
  for (int size = BLOCK; size > 1; size >>= 2) scale *= size == 2 ? 0.70710678118654752f : 0.5f;
  return scale;
}

// The random sign of a dim of the rotation.
KV_FN float kv_sign(const KV_DEVICE int* signs, int dim) {
  return ((kv_uint)signs[dim >> 5] >> (dim & 31)) & 1u ? -1.0f : 1.0f;
}

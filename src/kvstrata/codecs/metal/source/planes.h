// Encoding and decoding of planes. Constants that the caller defines: KV_DIM; to encode, KV_BITS.
// table: rotation (first, step, gap, pairs), tokens, mean runs, two unused, signs [8], then pieces. To encode they have
// 5 numbers: first token, how many, mean run, mean run once more, where in its group the first token is.

#define KV_LARGEST 65504.0f  // of float16

typedef kv_share<KV_DIM> kv_of_vectors;

// RoPE rotation of a dim: x becomes x * cos + partner * sin.
struct kv_rotation {
  bool is_on;
  int partner;
  int angle;  // of the pair, in the row of an offset
  float sign;  // of the sine
};

KV_FN kv_rotation kv_rotation_of(const KV_DEVICE int* table, int dim) {
  const int first = table[0], step = table[1], gap = table[2], num_pairs = table[3], at = dim - first;
  kv_rotation rotation;
  rotation.is_on = at >= 0 && at < 2 * num_pairs;
  const int pair = !rotation.is_on ? 0 : step == 2 ? at / 2 : at % num_pairs;
  const bool is_second = rotation.is_on && (step == 2 ? at % 2 != 0 : at >= num_pairs);
  rotation.partner = !rotation.is_on ? dim : is_second ? dim - gap : dim + gap;
  rotation.angle = pair / 8 * 16 + pair % 8;
  rotation.sign = is_second ? 1.0f : -1.0f;
  return rotation;
}

// A dim of the mean, at an offset in the group.
KV_FN float kv_centre(
    const KV_DEVICE kv_half* mean, const KV_DEVICE int* table, const KV_DEVICE float* angles, int dim, int offset) {
  const kv_rotation rotation = kv_rotation_of(table, dim);
  if (!rotation.is_on) return float(mean[dim]);
  const KV_DEVICE float* at = angles + offset * kv_of_vectors::USED * 16 + rotation.angle;
  return float(mean[dim]) * at[0] + rotation.sign * float(mean[rotation.partner]) * at[8];
}

// Mean of the tokens of a piece, and its rotation.
struct kv_centring {
  const KV_DEVICE int* table;
  const KV_DEVICE float* angles;
  int offset;  // of the piece's first token in its group
  bool is_rotated;
};

// `count` vectors from `start` on, to `out`. A vector is rotated back in the registers of the lanes that share it.
template <int KIND, typename T>
KV_FN void kv_decode(
    const KV_LOCAL kv_source& source, const KV_LOCAL kv_centring& centring, int start, int count, KV_DEVICE T* out,
    int lane) {
  const int unit = lane % kv_of_vectors::LANES, slot = lane / kv_of_vectors::LANES;
  const int used = unit < kv_of_vectors::USED ? unit : 0;
  for (int base = 0; base < count; base += kv_of_vectors::TOKENS) {
    const int t = base + slot < count ? base + slot : count - 1;
    kv_packed packed;
    float values[16];
    kv_fetch<KIND, KV_DIM>(source, start + t, used, packed);
    kv_spread<KIND>(packed, values);
    if (KV_IS_CODED(KIND)) {
      KV_UNROLL
      for (int r = 0; r < 16; ++r) values[r] = (values[r] + 0.5f) * packed.scale;
      kv_hadamard_registers<kv_of_vectors::BLOCK>(values, lane);
    }
    if (base + slot >= count || unit >= kv_of_vectors::USED) continue;
    KV_UNROLL
    for (int r = 0; r < 16; ++r) {
      const int dim = unit * 16 + KV_DIM_OF(r);
      float value = values[r];
      if (KV_IS_CODED(KIND)) {
        value *= kv_hadamard_scale<kv_of_vectors::BLOCK>() * kv_sign(centring.table + 8, dim);
        value += centring.is_rotated ? kv_centre(source.mean, centring.table, centring.angles, dim, centring.offset + t)
                                : float(source.mean[dim]);
      }
      out[kv_long(t) * KV_DIM + dim] = T(value);
    }
  }
}

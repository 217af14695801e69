// Encoding and decoding of planes: what both need of the means. Constants that the caller defines: KV_DIM, KV_BITS.
// table: turn (first, step, gap, pairs), tokens, segments, two unused, signs [8], then pieces [5]: first token, how many,
// segment, segment once more, where in its group the first token is.

#define KV_LARGEST 65504.0f  // of float16

typedef kv_share<KV_DIM> kv_of_vectors;

// How a dim turns: x becomes x * cos + partner * sin.
struct kv_turned {
  bool is_on;
  int partner;
  int angle;  // of the pair, in the row of an offset
  float sign;  // of the sine
};

KV_FN kv_turned kv_turn_of(const KV_DEVICE int* table, int dim) {
  const int first = table[0], step = table[1], gap = table[2], num_pairs = table[3], at = dim - first;
  kv_turned turned;
  turned.is_on = at >= 0 && at < 2 * num_pairs;
  const int pair = !turned.is_on ? 0 : step == 2 ? at / 2 : at % num_pairs;
  const bool is_second = turned.is_on && (step == 2 ? at % 2 != 0 : at >= num_pairs);
  turned.partner = !turned.is_on ? dim : is_second ? dim - gap : dim + gap;
  turned.angle = pair / 8 * 16 + pair % 8;
  turned.sign = is_second ? 1.0f : -1.0f;
  return turned;
}

// A dim of the mean, at an offset in the group.
KV_FN float kv_centre(
    const KV_DEVICE kv_half* mean, const KV_DEVICE int* table, const KV_DEVICE float* angles, int dim, int offset) {
  const kv_turned turned = kv_turn_of(table, dim);
  if (!turned.is_on) return float(mean[dim]);
  const KV_DEVICE float* at = angles + offset * kv_of_vectors::USED * 16 + turned.angle;
  return float(mean[dim]) * at[0] + turned.sign * float(mean[turned.partner]) * at[8];
}

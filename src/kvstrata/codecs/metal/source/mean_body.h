  // Work of a group: a piece that is a whole mean run, a head. The mean of its vectors, rotated back to the start of
  // their group.
  const int lane = KV_LANE, head = KV_GROUP_Y, num_tokens = table[4], num_mean_runs = table[5];
  const KV_DEVICE int* piece = table + 16 + 5 * KV_GROUP_X;
  const int start = piece[0], count = piece[1];
  for (int dim = lane; dim < KV_DIM; dim += 32) {
    const kv_rotation rotation = kv_rotation_of(table, dim);
    float sum = 0.0f;
    for (int t = 0; t < count; ++t) {
      const kv_long at = (kv_long(head) * num_tokens + start + t) * KV_DIM;
      // Values that float16 cannot hold must not move the mean. Both comparisons are false for NaN.
      const float wide = float(x[at + dim]), mine = wide <= KV_LARGEST && wide >= -KV_LARGEST ? wide : 0.0f;
      if (!rotation.is_on) {
        sum += mine;
        continue;
      }
      const float far = float(x[at + rotation.partner]), other = far <= KV_LARGEST && far >= -KV_LARGEST ? far : 0.0f;
      const KV_DEVICE float* angle = angles + (piece[4] + t) * kv_of_vectors::USED * 16 + rotation.angle;
      sum += mine * angle[0] - rotation.sign * other * angle[8];
    }
    means[(kv_long(head) * num_mean_runs + piece[2]) * KV_DIM + dim] = kv_half(sum / float(count));
  }

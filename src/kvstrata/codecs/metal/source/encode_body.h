  // Work of a group: a piece, a head. A vector is centred, rotated and coded in the registers of the lanes that share
  // it.
  const int lane = KV_LANE, head = KV_GROUP_Y, num_tokens = table[4], num_mean_runs = table[5];
  const int unit = lane % kv_of_vectors::LANES, slot = lane / kv_of_vectors::LANES;
  const int used = unit < kv_of_vectors::USED ? unit : 0;
  const KV_DEVICE int* piece = table + 16 + 5 * KV_GROUP_X;
  const int start = piece[0], count = piece[1];
  const KV_DEVICE kv_half* mean = means + (kv_long(head) * num_mean_runs + piece[2]) * KV_DIM;
  const float factor = kv_hadamard_scale<kv_of_vectors::BLOCK>();
  for (int base = 0; base < count; base += kv_of_vectors::TOKENS) {
    const int t = base + slot < count ? base + slot : count - 1;
    const kv_long token = kv_long(head) * num_tokens + start + t;
    float values[16];
    KV_UNROLL
    for (int r = 0; r < 16; ++r) {
      const int dim = used * 16 + KV_DIM_OF(r);
      float value = float(x[token * KV_DIM + dim]);
      value = value != value ? 0.0f : value > KV_LARGEST ? KV_LARGEST : value < -KV_LARGEST ? -KV_LARGEST : value;
      value = (value - kv_centre(mean, table, angles, dim, piece[4] + t)) * kv_sign(table + 8, dim);
      values[r] = value;
    }
    kv_hadamard_registers<kv_of_vectors::BLOCK>(values, lane);
    float largest = 0.0f;
    KV_UNROLL
    for (int r = 0; r < 16; ++r) {
      values[r] *= factor;
      // Lanes without dims of their own have rotated something that is no vector.
      const float size = values[r] < 0.0f ? -values[r] : values[r];
      largest = kv_larger(largest, unit < kv_of_vectors::USED ? size : 0.0f);
    }
    for (int mask = 1; mask < kv_of_vectors::LANES; mask <<= 1) {
      largest = kv_larger(largest, kv_shuffle_xor(largest, mask));
    }
    // Codes belong to the scale as it is stored, so its rounding costs nothing.
    const kv_half scale = kv_half(largest < KV_LARGEST ? largest : KV_LARGEST);
    const float stored = float(scale), divisor = stored == 0.0f ? 1.0f : stored;
    kv_uint tops = 0u, nexts = 0u, lows[2] = {0u, 0u};
    KV_UNROLL
    for (int r = 0; r < 16; ++r) {
      const float level = kv_floor((values[r] / divisor + 1.0f) * 128.0f);
      const kv_uint code = level < 0.0f ? 0u : level > 255.0f ? 255u : kv_uint(level);
      const int dim = KV_DIM_OF(r);
      tops |= (code >> 6) << (2 * dim);
      nexts |= ((code >> 4) & 3u) << (2 * dim);
      lows[dim / 8] |= (code & 15u) << (4 * (dim % 8));
    }
    if (base + slot < count && unit < kv_of_vectors::USED) {
      const kv_long at = token * (KV_DIM / 16) + unit;
      top[at] = tops;
#if KV_BITS >= 4
      next[at] = nexts;
#endif
#if KV_BITS == 8
      low[2 * at] = lows[0];
      low[2 * at + 1] = lows[1];
#endif
      if (unit == 0) scales[token] = scale;
    }
  }

// starts: first token and number of tokens to decode, offset of token 0 in its group, bits; then the first token of
// each mean run, and the end.

  using Rotation = kvstrata::Rotation<PAIRS, FIRST, INTERLEAVED>;
  const int num_tokens = k_scales_shape[1], num_mean_runs = k_means_shape[1], start = starts[0], count = starts[1];
  const long num_units = long(k_scales_shape[0]) * count * (DIM / 16);
  kvstrata::decode<Rotation, T, DIM>(
      starts[3], k_top, k_next, k_low, k_scales, k_means, k_signs, angles, starts[2], starts + 4, num_mean_runs,
      long(blockIdx.x) * blockDim.x + threadIdx.x, num_units, num_tokens, start, count, out);

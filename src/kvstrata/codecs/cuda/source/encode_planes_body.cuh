// Blocks: mean runs, heads.

  __shared__ float sums[kvstrata::ENCODE_THREADS];
  __shared__ float mean[DIM];
  using Rotation = kvstrata::Rotation<PAIRS, FIRST, INTERLEAVED>;
  const int num_tokens = x_shape[1], num_mean_runs = starts_shape[0] - 5, head = blockIdx.y, offset = starts[2];
  const int start = starts[4 + blockIdx.x], end = starts[5 + blockIdx.x];
  const long row = long(head) * num_tokens;
  kvstrata::mean_of<Rotation, DIM>(
      x + row * DIM, angles, offset, start, end, sums, mean, means + (long(head) * num_mean_runs + blockIdx.x) * DIM);
  kvstrata::encode<Rotation, BITS, DIM>(
      x + row * DIM, mean, signs, angles, offset, start, end, top + row * (DIM / 16),
      next + (BITS >= 4 ? row * (DIM / 16) : 0), low + (BITS == 8 ? row * (DIM / 8) : 0), scales + row);

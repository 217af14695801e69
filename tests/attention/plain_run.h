// Runs KV_KERNEL for every group of a grid, one after the other. Tells whether lanes met as they must.

static void** kv_arguments;

static void kv_fibre() {
  KV_KERNEL(kv_arguments);
  kv_is_done[kv_lane] = true;
  if (--kv_running == 0) _longjmp(kv_home, 1);
  kv_go_on();
}

static void kv_run_group() {
  std::memset(kv_meetings, 0, sizeof kv_meetings);
  std::memset(kv_is_done, 0, sizeof kv_is_done);
  kv_running = KV_LANES;
  for (int lane = 0; lane < KV_LANES; ++lane) {
    // Each fibre is entered once to have a point that others can jump to.
    kv_lane = lane;
    getcontext(&kv_contexts[lane]);
    kv_contexts[lane].uc_stack.ss_sp = kv_stacks[lane];
    kv_contexts[lane].uc_stack.ss_size = KV_STACK_BYTES;
    kv_contexts[lane].uc_link = nullptr;
    makecontext(&kv_contexts[lane], [] {
      const int self = kv_lane;
      if (_setjmp(kv_fibres[self]) == 0) _longjmp(kv_home, 1);
      kv_fibre();
    }, 0);
    if (_setjmp(kv_home) == 0) setcontext(&kv_contexts[lane]);
  }
  kv_lane = kv_step > 0 ? 0 : KV_LANES - 1;
  if (_setjmp(kv_home) == 0) _longjmp(kv_fibres[kv_lane], 1);
  for (int lane = 1; lane < KV_LANES; ++lane) kv_diverged |= kv_meetings[lane] != kv_meetings[0];
}

extern "C" int kv_run(void** arguments, int x, int y, int z, int is_backwards) {
  kv_arguments = arguments;
  kv_step = is_backwards ? -1 : 1;
  kv_diverged = 0;
  for (kv_group[2] = 0; kv_group[2] < z; ++kv_group[2]) {
    for (kv_group[1] = 0; kv_group[1] < y; ++kv_group[1]) {
      for (kv_group[0] = 0; kv_group[0] < x; ++kv_group[0]) kv_run_group();
    }
  }
  return kv_diverged;
}

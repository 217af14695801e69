
static void** arguments;

static void live() {
  kernel(arguments);
  fibers[current].is_done = true;
  for (Meeting* meeting : {&warps[current / 32], &block}) {
    --meeting->alive;
    if (meeting->come && meeting->come == meeting->alive) meeting->come = 0, ++meeting->number;
  }
}

static void run_block() {
  const int count = fibers.size();
  warps.clear();
  for (int first = 0; first < count; first += 32) warps.push_back({min(32, count - first)});
  block = {count};
  any_of_block[0] = any_of_block[1] = 0;
  for (Fiber& fiber : fibers) {
    getcontext(&fiber.context);
    fiber.stack.resize(1 << 18);
    fiber.context.uc_stack = {fiber.stack.data(), 0, fiber.stack.size()};
    fiber.context.uc_link = &scheduler;
    fiber.is_done = false;
    makecontext(&fiber.context, live, 0);
  }
  for (int left = count; left;) {
    left = 0;
    for (current = 0; current < count; ++current) {
      if (fibers[current].is_done) continue;
      threadIdx = {current, 0, 0};
      swapcontext(&scheduler, &fibers[current].context);
      left += !fibers[current].is_done;
    }
  }
}

extern "C" void emulate(void** given, int threads, int x, int y, int z) {
  arguments = given;
  fibers.resize(threads);
  words.assign(2 * threads * MOST_WORDS, 0);
  blockDim = {threads, 1, 1}, gridDim = {x, y, z};
  for (blockIdx.z = 0; blockIdx.z < z; ++blockIdx.z) {
    for (blockIdx.y = 0; blockIdx.y < y; ++blockIdx.y) {
      for (blockIdx.x = 0; blockIdx.x < x; ++blockIdx.x) run_block();
    }
  }
}

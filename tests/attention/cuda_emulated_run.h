
static void** arguments;

// Arrays by their address, numbers by where they lie.
template <typename T>
static T argument(void* given) {
  if constexpr (std::is_pointer_v<T>) {
    return static_cast<T>(given);
  } else {
    return *static_cast<T*>(given);
  }
}

template <typename... Parameters, size_t... I>
static void call(void (*kernel)(Parameters...), std::index_sequence<I...>) {
  kernel(argument<Parameters>(arguments[I])...);
}

template <typename... Parameters>
static void call(void (*kernel)(Parameters...)) {
  call(kernel, std::index_sequence_for<Parameters...>());
}

static void live() {
  call(KERNEL);
  fibers[current].is_done = true;
  for (Meeting* meeting : {&warps[current / 32], &block}) {
    --meeting->alive;
    if (meeting->come && meeting->come == meeting->alive) meeting->come = 0, ++meeting->number;
  }
}

constexpr size_t STACK_BYTES = 1 << 16;

static void run_block(bool backwards) {
  const int count = fibers.size();
  warps.clear();
  for (int first = 0; first < count; first += 32) warps.push_back({min(32, count - first)});
  block = {count};
  for (Fiber& fiber : fibers) {
    getcontext(&fiber.context);
    if (!fiber.stack) fiber.stack.reset(new char[STACK_BYTES]);
    fiber.context.uc_stack = {fiber.stack.get(), 0, STACK_BYTES};
    fiber.context.uc_link = &scheduler;
    fiber.is_done = false;
    makecontext(&fiber.context, live, 0);
  }
  for (int left = count; left;) {
    left = 0;
    for (int i = 0; i < count; ++i) {
      current = backwards ? count - 1 - i : i;
      if (fibers[current].is_done) continue;
      threadIdx = {current, 0, 0};
      swapcontext(&scheduler, &fibers[current].context);
      left += !fibers[current].is_done;
    }
  }
}

extern "C" void emulate(void** given, int threads, int x, int y, int z, int backwards) {
  arguments = given;
  fibers.resize(threads);
  words.assign(2 * threads * MOST_WORDS, 0);
  votes.assign(2 * threads, 0);
  blockDim = {threads, 1, 1}, gridDim = {x, y, z};
  for (blockIdx.z = 0; blockIdx.z < z; ++blockIdx.z) {
    for (blockIdx.y = 0; blockIdx.y < y; ++blockIdx.y) {
      for (blockIdx.x = 0; blockIdx.x < x; ++blockIdx.x) run_block(backwards);
    }
  }
  fibers.clear();
}

// A simulated accelerator for tests, as a PrivateUse1 backend. It shows nothing about real chips.
//
// Tensors are in host memory. Each stream is a thread that runs its kernels one after the other. So
// a result exists only after the host has waited for the stream. The duration of a kernel does not
// depend on this thread: it is planned. All times are moments of a simulated clock in nanoseconds,
// so they are the same on every machine:
//
//     host clock    advances by `launch_ns` for each kernel, by `event_ns` for each event, and by
//                   the time that a test adds. If the host waits for a stream, the clock is set to
//                   the moment at which the stream is done.
//     stream        begins a kernel when the host has launched it and the previous kernel is done.
//
// While Kineto records a trace, it reads the real clock for events of the host. So the host clock
// can follow the real clock instead.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/add.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/fill.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/ApproximateClock.h>
#include <torch/library.h>

#if defined(USE_KINETO) && __has_include(<torch/csrc/profiler/standalone/privateuse1_profiler.h>)
#define SIMULATED_TRACES 1
#include <libkineto.h>
#include <output_base.h>
#include <torch/csrc/profiler/standalone/privateuse1_profiler.h>
#endif

#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

namespace simulated {

constexpr int DEVICES = 2;
// Streams of each device. The first one is the default stream.
constexpr int STREAMS = 5;
constexpr auto TYPE = c10::DeviceType::PrivateUse1;
constexpr size_t ALIGNMENT = 512;

// The planned times and limits. A test sets them while nothing runs.
struct Plan {
  // Time of the host for each kernel and for each event.
  int64_t launch_ns = 5000;
  int64_t event_ns = 1000;
  // Time of a matmul on the device.
  double ns_per_mac = 1e-3;
  // Time of all other kernels, for the bytes of their arguments and results.
  double ns_per_byte = 1e-2;
  // Time of a kernel of any size, by the name of its operator.
  std::map<std::string, int64_t> kernels;
  // Factor for the time of each kernel of a device.
  std::array<double, DEVICES> slower = {1.0, 1.0};
  // Bytes of memory of each device.
  std::array<int64_t, DEVICES> limit = {int64_t(1) << 40, int64_t(1) << 40};
  bool timed_events = true;
};

struct Kernel {
  std::string name;
  int device, stream;
  int64_t launched, start, end;
  int64_t host_thread, link, correlation;
};

Plan plan;
// Protects the plan, the moments of streams and events, and the logs of kernels.
std::mutex state_mutex;
std::atomic<int64_t> host_ns{0};
std::atomic<bool> follows_real_clock{false};
std::atomic<int64_t> synchronisations{0}, copies_to_host{0};
std::vector<Kernel> kernels_log;
std::atomic<bool> traces{false};
std::vector<Kernel> traced_kernels;
std::atomic<int64_t> correlations{0};
// The operators that are running on this thread, as reported by Kineto.
thread_local std::vector<int64_t> links;
thread_local int current_device = 0;
thread_local std::array<int, DEVICES> current_stream = {0, 0};
// Within an operator that runs on the CPU, copies are a part of the operator and take no time.
thread_local bool within_fallback = false;

int64_t host_now() {
  return follows_real_clock ? c10::getTime() : host_ns.load();
}

void host_waits_until(int64_t moment) {
  if (follows_real_clock) {
    for (int64_t left = moment - c10::getTime(); left > 0; left = moment - c10::getTime())
      std::this_thread::sleep_for(std::chrono::nanoseconds(left));
    return;
  }
  int64_t now = host_ns;
  while (now < moment && !host_ns.compare_exchange_weak(now, moment)) {
  }
}

void host_works(int64_t nanoseconds) {
  if (!follows_real_clock)
    host_ns += nanoseconds;
}

// A stream: the moment until which it is busy, and a thread that runs the launched kernels.
class Stream {
 public:
  int device = 0, id = 0;
  int64_t busy_until = 0;

  // Let the thread run a function after all earlier ones. Returns its number on this stream.
  int64_t run(std::function<void()> work) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!started_) {
      started_ = true;
      std::thread([this] { loop(); }).detach();
    }
    waiting_.push_back(std::move(work));
    changed_.notify_all();
    return ++launched_;
  }

  // Wait until the function with this number has run. The simulated clock does not advance.
  void settle(int64_t number) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return done_ >= number; });
  }

  void settle() {
    int64_t all;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      all = launched_;
    }
    settle(all);
  }

 private:
  void loop() {
    at::AutoDispatchBelowADInplaceOrView guard;
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return !waiting_.empty(); });
      auto work = std::move(waiting_.front());
      waiting_.pop_front();
      lock.unlock();
      work();
      work = nullptr;
      lock.lock();
      ++done_;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> waiting_;
  int64_t launched_ = 0, done_ = 0;
  bool started_ = false;
};

Stream& stream_of(int device, int id) {
  // This is never deleted, because the threads run until the process has ended.
  static auto* streams = new std::array<std::array<Stream, STREAMS>, DEVICES>();
  auto& found = (*streams).at(device).at(id);
  found.device = device;
  found.id = id;
  return found;
}

Stream& stream_now(int device) {
  return stream_of(device, current_stream.at(device));
}

void settle_device(int device) {
  for (int id = 0; id < STREAMS; ++id)
    stream_of(device, id).settle();
}

void wait_for(Stream& stream) {
  ++synchronisations;
  stream.settle();
  host_waits_until(stream.busy_until);
}

// Launch a kernel on a stream. `work` computes the result, and `nanoseconds` is the simulated time.
void launch(Stream& stream, const std::string& name, double nanoseconds, std::function<void()> work) {
  host_works(plan.launch_ns);
  {
    std::lock_guard<std::mutex> lock(state_mutex);
    auto planted = plan.kernels.find(name);
    double takes = (planted == plan.kernels.end() ? nanoseconds : planted->second) * plan.slower.at(stream.device);
    int64_t launched = host_now(), start = std::max(launched, stream.busy_until);
    stream.busy_until = start + static_cast<int64_t>(takes);
    Kernel kernel{
        name, stream.device, stream.id, launched, start, stream.busy_until, syscall(SYS_gettid), links.empty() ? 0 : links.back(), ++correlations};
    kernels_log.push_back(kernel);
    if (traces)
      traced_kernels.push_back(kernel);
  }
  if (work)
    stream.run(std::move(work));
}

struct Event {
  int device = 0;
  Stream* stream = nullptr;
  int64_t moment = 0, number = 0;
};

// A caching allocator. A freed block is kept, and reused only by the same stream. Reserved memory
// is the sum of allocated and kept blocks.
class Allocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const int device = current_device;
    const c10::Device place(TYPE, static_cast<c10::DeviceIndex>(device));
    if (bytes == 0)
      return {nullptr, nullptr, &release, place};
    size_t size = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    void* pointer = reuse(device, size);
    if (pointer == nullptr) {
      if (!fits(device, size)) {
        ++stats_[device].num_alloc_retries;
        drop(device);
      }
      if (!fits(device, size)) {
        ++stats_[device].num_ooms;
        TORCH_CHECK_WITH(
            OutOfMemoryError, false, "simulated:", device, " is out of memory: tried to allocate ", size, " bytes, ",
            stats_[device].allocated_bytes[0].current, " of ", plan.limit[device], " are allocated");
      }
      TORCH_CHECK(posix_memalign(&pointer, ALIGNMENT, size) == 0, "the host has no memory for the simulated device");
      add(stats_[device].reserved_bytes, size);
      add(stats_[device].segment, 1);
      ++stats_[device].num_device_alloc;
    }
    blocks_[pointer] = Block{device, current_stream[device], size, {}};
    add(stats_[device].allocated_bytes, size);
    add(stats_[device].active_bytes, size);
    add(stats_[device].requested_bytes, bytes);
    requested_[pointer] = bytes;
    add(stats_[device].allocation, 1);
    return {pointer, pointer, &release, place};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }

  void copy_data(void* to, const void* from, size_t count) const override {
    for (int device = 0; device < DEVICES; ++device)
      settle_device(device);
    std::memcpy(to, from, count);
  }

  bool initialized() override {
    return true;
  }

  void emptyCache(c10::MempoolId_t = {0, 0}) override {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    for (int device = 0; device < DEVICES; ++device)
      drop(device);
  }

  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    auto found = blocks_.find(data.get());
    if (found != blocks_.end())
      found->second.others.insert(static_cast<int>(stream.id()));
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    return stats_.at(device);
  }

  void resetAccumulatedStats(c10::DeviceIndex device) override {
    each_stat(device, [](c10::CachingAllocator::Stat& stat) { stat.reset_accumulated(); });
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    auto& stats = stats_.at(device);
    stats.num_alloc_retries = stats.num_ooms = stats.num_device_alloc = stats.num_device_free = 0;
  }

  void resetPeakStats(c10::DeviceIndex device) override {
    each_stat(device, [](c10::CachingAllocator::Stat& stat) { stat.reset_peak(); });
  }

  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    const auto total = plan.limit.at(device);
    return {total - stats_.at(device).reserved_bytes[0].current, total};
  }

 private:
  struct Block {
    int device, stream;
    size_t size;
    // Other streams that use the block.
    std::set<int> others;
  };

  static void release(void* pointer);

  static void add(c10::CachingAllocator::StatArray& stats, size_t amount) {
    stats[0].increase(amount);
  }

  static void take(c10::CachingAllocator::StatArray& stats, size_t amount) {
    stats[0].decrease(amount);
  }

  bool fits(int device, size_t size) const {
    return stats_[device].reserved_bytes[0].current + static_cast<int64_t>(size) <= plan.limit[device];
  }

  void* reuse(int device, size_t size) {
    auto& kept = free_[{device, current_stream[device]}];
    auto found = kept.find(size);
    if (found == kept.end())
      return nullptr;
    void* pointer = found->second;
    kept.erase(found);
    return pointer;
  }

  void drop(int device) {
    settle_device(device);
    for (auto& [place, kept] : free_) {
      if (place.first != device)
        continue;
      for (auto& [size, pointer] : kept) {
        std::free(pointer);
        take(stats_[device].reserved_bytes, size);
        take(stats_[device].segment, 1);
        ++stats_[device].num_device_free;
      }
      kept.clear();
    }
  }

  void free(void* pointer) {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    auto found = blocks_.find(pointer);
    if (found == blocks_.end())
      return;
    auto block = found->second;
    for (int id : block.others)
      stream_of(block.device, id).settle();
    take(stats_[block.device].allocated_bytes, block.size);
    take(stats_[block.device].active_bytes, block.size);
    take(stats_[block.device].requested_bytes, requested_[pointer]);
    take(stats_[block.device].allocation, 1);
    free_[{block.device, block.stream}].emplace(block.size, pointer);
    requested_.erase(pointer);
    blocks_.erase(found);
  }

  template <typename Reset>
  void each_stat(c10::DeviceIndex device, Reset reset) {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    auto& stats = stats_.at(device);
    for (auto* each :
         {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes, &stats.requested_bytes, &stats.allocation, &stats.segment})
      reset((*each)[0]);
  }

  mutable std::recursive_mutex mutex_;
  std::unordered_map<const void*, Block> blocks_;
  std::unordered_map<const void*, size_t> requested_;
  std::map<std::pair<int, int>, std::multimap<size_t, void*>> free_;
  std::array<c10::CachingDeviceAllocator::DeviceStats, DEVICES> stats_;
};

Allocator& allocator() {
  // This is never deleted, because tensors may be freed after the destructors of statics have run.
  static auto* found = new Allocator();
  return *found;
}

void Allocator::release(void* pointer) {
  if (pointer != nullptr)
    allocator().free(pointer);
}

// The interface that torch requires of a device: the current device, streams and events.
struct Guard final : public c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return TYPE;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    return c10::Device(TYPE, static_cast<c10::DeviceIndex>(std::exchange(current_device, device.index())));
  }
  c10::Device getDevice() const override {
    return c10::Device(TYPE, static_cast<c10::DeviceIndex>(current_device));
  }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < DEVICES, "there are ", DEVICES, " simulated devices, and no number ", int(device.index()));
    current_device = device.index() < 0 ? current_device : device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    current_device = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return DEVICES;
  }

  static c10::Stream as_torch(int device, int id) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(TYPE, static_cast<c10::DeviceIndex>(device)), id);
  }
  static Stream& own(const c10::Stream& stream) {
    return stream_of(stream.device_index(), static_cast<int>(stream.id()));
  }
  c10::Stream getStream(c10::Device device) const noexcept override {
    const int index = device.index() < 0 ? current_device : device.index();
    return as_torch(index, current_stream[index]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return as_torch(device.index() < 0 ? current_device : device.index(), 0);
  }
  c10::Stream getNewStream(c10::Device device, int = 0) const override {
    static std::atomic<int> made{0};
    return as_torch(device.index() < 0 ? current_device : device.index(), 1 + made++ % (STREAMS - 1));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool = false) const override {
    return getNewStream(device);
  }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override {
    auto& current = current_stream[stream.device_index()];
    return as_torch(stream.device_index(), std::exchange(current, static_cast<int>(stream.id())));
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return &own(stream);
  }
  bool queryStream(const c10::Stream& stream) const override {
    return own(stream).busy_until <= host_now();
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    wait_for(own(stream));
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    ++synchronisations;
    const int index = device < 0 ? current_device : device;
    settle_device(index);
    for (int id = 0; id < STREAMS; ++id)
      host_waits_until(stream_of(index, id).busy_until);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    allocator().recordStream(data, stream);
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex device, const c10::EventFlag) const override {
    TORCH_CHECK(device == -1 || device == stream.device_index(), "an event of another device");
    host_works(plan.event_ns);
    auto* found = static_cast<Event*>(*event);
    if (found == nullptr)
      *event = found = new Event();
    auto& on = own(stream);
    std::lock_guard<std::mutex> lock(state_mutex);
    found->device = on.device;
    found->stream = &on;
    found->moment = on.busy_until = std::max(on.busy_until, host_now());
    found->number = on.run([] {});
  }
  void block(void* event, const c10::Stream& stream) const override {
    auto* found = static_cast<Event*>(event);
    if (found == nullptr)
      return;
    auto& on = own(stream);
    std::lock_guard<std::mutex> lock(state_mutex);
    on.busy_until = std::max(on.busy_until, found->moment);
    on.run([from = found->stream, number = found->number] { from->settle(number); });
  }
  bool queryEvent(void* event) const override {
    auto* found = static_cast<Event*>(event);
    return found == nullptr || found->moment <= host_now();
  }
  void synchronizeEvent(void* event) const override {
    auto* found = static_cast<Event*>(event);
    if (found == nullptr)
      return;
    ++synchronisations;
    found->stream->settle(found->number);
    host_waits_until(found->moment);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    TORCH_CHECK(plan.timed_events, "Backend doesn't support elapsedTime.");
    auto *from = static_cast<Event*>(first), *to = static_cast<Event*>(second);
    TORCH_CHECK(from->device == to->device, "events of two devices");
    return static_cast<double>(to->moment - from->moment) / 1e6;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Generator final : public at::CPUGeneratorImpl {
  explicit Generator(c10::DeviceIndex device) {
    device_ = c10::Device(TYPE, device);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};

struct Hooks final : public at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return DEVICES;
  }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    current_device = device;
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(current_device);
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return static_cast<c10::DeviceIndex>(std::exchange(current_device, device));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 || device >= DEVICES ? getCurrentDevice() : exchangeDevice(device);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    static std::array<at::Generator, DEVICES> generators = {at::make_generator<Generator>(0), at::make_generator<Generator>(1)};
    return generators.at(device < 0 ? current_device : device);
  }
  // FSDP allocates and frees the memory of a storage in this way.
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    TORCH_CHECK(!nbytes || !storage.nbytes(), "a storage of the simulated device is resized from nothing or to nothing");
    const c10::DeviceGuard guard(storage.device());
    auto* impl = storage.unsafeGetStorageImpl();
    impl->set_data_ptr(impl->allocator()->allocate(nbytes));
    impl->set_nbytes(nbytes);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Generator>(device < 0 ? static_cast<c10::DeviceIndex>(current_device) : device);
  }
  at::Device getDeviceFromPtr(void*) const override {
    return c10::Device(TYPE, static_cast<c10::DeviceIndex>(current_device));
  }
};

// Return a CPU tensor with the memory of a tensor.
at::Tensor on_host(const at::Tensor& tensor) {
  if (tensor.is_cpu())
    return tensor;
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU).requires_grad(false));
}

double bytes(std::initializer_list<at::Tensor> tensors) {
  double sum = 0;
  for (const auto& each : tensors)
    sum += each.defined() ? static_cast<double>(each.nbytes()) : 0.0;
  return sum;
}

at::Tensor like(c10::IntArrayRef sizes, const at::Tensor& tensor) {
  const c10::DeviceGuard guard(tensor.device());
  return at::empty(sizes, tensor.options().requires_grad(false));
}

// The kernels that the device has itself. They run later, on the thread of the stream.

void product(const std::string& name, double macs, const at::Tensor& result, std::function<void()> work) {
  launch(stream_now(result.device().index()), name, macs * plan.ns_per_mac, std::move(work));
}

at::Tensor& mm_out(const at::Tensor& left, const at::Tensor& right, at::Tensor& result) {
  TORCH_CHECK(left.dim() == 2 && right.dim() == 2 && left.size(1) == right.size(0), "mm: shapes do not fit");
  result.resize_({left.size(0), right.size(1)});
  auto a = on_host(left), b = on_host(right), c = on_host(result);
  product("mm", double(left.size(0)) * double(left.size(1)) * double(right.size(1)), result, [a, b, c]() mutable { at::mm_out(c, a, b); });
  return result;
}

at::Tensor mm(const at::Tensor& left, const at::Tensor& right) {
  auto result = like({left.size(0), right.size(1)}, left);
  return mm_out(left, right, result);
}

at::Tensor addmm(const at::Tensor& bias, const at::Tensor& left, const at::Tensor& right, const at::Scalar& beta, const at::Scalar& alpha) {
  TORCH_CHECK(left.dim() == 2 && right.dim() == 2 && left.size(1) == right.size(0), "addmm: shapes do not fit");
  auto result = like({left.size(0), right.size(1)}, left);
  auto a = on_host(left), b = on_host(right), c = on_host(bias), d = on_host(result);
  product("addmm", double(left.size(0)) * double(left.size(1)) * double(right.size(1)), result, [a, b, c, d, beta, alpha]() mutable {
    at::addmm_out(d, c, a, b, beta, alpha);
  });
  return result;
}

at::Tensor bmm(const at::Tensor& left, const at::Tensor& right) {
  TORCH_CHECK(left.dim() == 3 && right.dim() == 3 && left.size(2) == right.size(1), "bmm: shapes do not fit");
  auto result = like({left.size(0), left.size(1), right.size(2)}, left);
  auto a = on_host(left), b = on_host(right), c = on_host(result);
  product("bmm", double(left.numel()) * double(right.size(2)), result, [a, b, c]() mutable { at::bmm_out(c, a, b); });
  return result;
}

at::Tensor relu(const at::Tensor& self) {
  auto result = like(self.sizes(), self);
  auto a = on_host(self), b = on_host(result);
  launch(stream_now(self.device().index()), "relu", bytes({self, result}) * plan.ns_per_byte, [a, b]() mutable { b.copy_(at::relu(a)); });
  return result;
}

at::Tensor& zero_(at::Tensor& self) {
  auto a = on_host(self);
  launch(stream_now(self.device().index()), "zero_", bytes({self}) * plan.ns_per_byte, [a]() mutable { a.fill_(0); });
  return self;
}

// Memory, views and copies.

at::Tensor empty_memory_format(
    c10::IntArrayRef sizes, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>, std::optional<c10::Device> device,
    std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  const c10::DeviceGuard guard(c10::device_or_default(device));
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(sizes, &allocator(), keys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef sizes, c10::IntArrayRef strides, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<c10::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(c10::device_or_default(device));
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(sizes, strides, &allocator(), keys, c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const auto device = (from.is_cpu() ? to : from).device().index();
  auto target = on_host(to);
  if (within_fallback) {
    settle_device(device);
    at::native::copy_(target, on_host(from), false);
    return to;
  }
  auto& stream = stream_now(device);
  // A tensor of the host is read at once, as if its memory was not pinned. So the caller may write
  // to it as soon as this function returns.
  at::Tensor source = on_host(from);
  if (from.is_cpu()) {
    source = at::empty_like(from, at::MemoryFormat::Preserve);
    at::native::copy_(source, from, false);
  }
  const auto* name = from.is_cpu() ? "copy to device" : to.is_cpu() ? "copy to host" : "copy";
  if (!from.is_cpu() && !to.is_cpu() && from.device() != to.device())
    settle_device(to.device().index());
  launch(stream, name, bytes({from, to}) * plan.ns_per_byte, [source, target]() mutable { target.copy_(source); });
  if (to.is_cpu())
    ++copies_to_host;
  if (to.is_cpu() || (from.is_cpu() && !non_blocking))
    wait_for(stream);
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  at::native::resize_(to, from.sizes(), std::nullopt);
  return copy_from(from, to, false);
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  auto& stream = stream_now(self.device().index());
  launch(stream, "copy to host", bytes({self}) * plan.ns_per_byte, nullptr);
  ++copies_to_host;
  wait_for(stream);
  settle_device(self.device().index());
  return on_host(self).item();
}

const at::Tensor& resize_(const at::Tensor& self, c10::IntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(self.device());
  return at::native::resize_(self, sizes, format);
}

// All other operators are computed on the CPU. On the simulated clock they are kernels as well.
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  int device = -1;
  double moved = 0;
  auto look = [&](const c10::IValue& value) {
    auto add = [&](const at::Tensor& each) {
      if (each.defined() && each.device().type() == TYPE) {
        device = device < 0 ? each.device().index() : device;
        moved += static_cast<double>(each.nbytes());
      }
    };
    if (value.isTensor()) {
      add(value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& each : value.toTensorList())
        add(each);
    } else if (value.isOptionalTensorList()) {
      for (const std::optional<at::Tensor>& each : value.toOptionalTensorList())
        if (each.has_value())
          add(*each);
    } else if (value.isDevice() && value.toDevice().type() == TYPE) {
      device = device < 0 ? value.toDevice().index() : device;
    }
  };
  const size_t first = stack->size() - arguments.size();
  for (size_t place = first; place < stack->size(); ++place)
    look((*stack)[place]);
  device = device < 0 ? current_device : device;
  settle_device(device);
  // Random numbers are drawn on the CPU, with the state of the device's generator.
  std::optional<at::Generator> own, lent;
  for (size_t place = 0; place < arguments.size(); ++place) {
    if (arguments[place].type()->str().find("Generator") == std::string::npos)
      continue;
    auto& given = (*stack)[first + place];
    own = given.isGenerator() ? given.toGenerator() : at::globalContext().defaultGenerator(c10::Device(TYPE, static_cast<c10::DeviceIndex>(device)));
    lent = at::make_generator<at::CPUGeneratorImpl>();
    lent->set_state(own->get_state());
    given = *lent;
  }
  const bool before = std::exchange(within_fallback, true);
  try {
    const c10::DeviceGuard guard(c10::Device(TYPE, static_cast<c10::DeviceIndex>(device)));
    at::native::cpu_fallback(op, stack);
  } catch (...) {
    within_fallback = before;
    throw;
  }
  within_fallback = before;
  if (own.has_value())
    own->set_state(lent->get_state());
  for (size_t place = stack->size() - op.schema().returns().size(); place < stack->size(); ++place)
    look((*stack)[place]);
  const auto& name = op.schema().name();
  launch(stream_now(device), name.substr(name.rfind(':') + 1), moved * plan.ns_per_byte, nullptr);
}

at::Tensor as_strided(const at::Tensor& self, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides, std::optional<c10::SymInt> offset) {
  return at::cpu::as_strided_symint(self, sizes, strides, offset);
}
at::Tensor reshape_alias(const at::Tensor& self, c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  return at::native::_reshape_alias(self, sizes, strides);
}
at::Tensor view(const at::Tensor& self, c10::IntArrayRef sizes) {
  return at::native::view(self, sizes);
}
at::Tensor unfold(const at::Tensor& self, int64_t dimension, int64_t size, int64_t step) {
  return at::native::unfold(self, dimension, size, step);
}
at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return at::native::set_tensor_(self, source);
}
at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  return at::native::set_(self, std::move(source));
}
at::Tensor& set_storage_offset(
    at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  return at::cpu::set_(self, std::move(source), offset, sizes, strides);
}

at::Generator default_generator(int64_t device) {
  return at::globalContext().defaultGenerator(c10::Device(TYPE, static_cast<c10::DeviceIndex>(device)));
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty_memory_format);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("resize_", resize_);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("view", view);
  m.impl("unfold", unfold);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage_offset);
  m.impl("mm", mm);
  m.impl("mm.out", mm_out);
  m.impl("addmm", addmm);
  m.impl("bmm", bmm);
  m.impl("relu", relu);
  m.impl("zero_", zero_);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
}

TORCH_LIBRARY_FRAGMENT(simulated, m) {
  m.def("default_generator(int device) -> Generator?", default_generator);
}

#ifdef SIMULATED_TRACES
// The kernels of the devices while Kineto records a trace.
class TraceSession final : public libkineto::IActivityProfilerSession {
 public:
  void start() override {
    std::lock_guard<std::mutex> lock(state_mutex);
    traced_kernels.clear();
    started_ = c10::getTime();
    traces = true;
    status_ = libkineto::TraceStatus::RECORDING;
  }
  void stop() override {
    std::lock_guard<std::mutex> lock(state_mutex);
    traces = false;
    ended_ = c10::getTime();
    kernels_.swap(traced_kernels);
    traced_kernels.clear();
    status_ = libkineto::TraceStatus::PROCESSING;
  }
  std::vector<std::string> errors() override {
    return {};
  }
  void processTrace(libkineto::ActivityLogger&) override {}
  void processTrace(libkineto::ActivityLogger& logger, libkineto::getLinkedActivityCallback linked, int64_t, int64_t) override {
    buffer_ = std::make_unique<libkineto::CpuTraceBuffer>();
    buffer_->span = libkineto::TraceSpan(started_, ended_, "simulated");
    buffer_->gpuOpCount = static_cast<int>(kernels_.size());
    for (const auto& kernel : kernels_) {
      const auto* operation = linked(static_cast<int32_t>(kernel.link));
      add(kernel, "launch", libkineto::ActivityType::PRIVATEUSE1_RUNTIME, static_cast<int32_t>(getpid()), static_cast<int32_t>(kernel.host_thread), operation);
      auto& launched = *buffer_->activities.back();
      launched.startTime = kernel.launched;
      launched.endTime = kernel.launched + 1000;
      launched.flow.start = 1;
      const auto kind = kernel.name.rfind("copy", 0) == 0 ? libkineto::ActivityType::GPU_MEMCPY : libkineto::ActivityType::CONCURRENT_KERNEL;
      add(kernel, kernel.name, kind, kernel.device, kernel.stream, operation);
      buffer_->activities.back()->addMetadata("stream", kernel.stream);
      buffer_->activities.back()->addMetadata("device", kernel.device);
    }
    for (const auto& activity : buffer_->activities)
      logger.handleGenericActivity(*activity);
  }
  std::unique_ptr<libkineto::DeviceInfo> getDeviceInfo() override {
    return nullptr;
  }
  std::vector<libkineto::ResourceInfo> getResourceInfos() override {
    return {};
  }
  std::unique_ptr<libkineto::CpuTraceBuffer> getTraceBuffer() override {
    return std::move(buffer_);
  }
  void pushCorrelationId(uint64_t id) override {
    links.push_back(static_cast<int64_t>(id));
  }
  void popCorrelationId() override {
    if (!links.empty())
      links.pop_back();
  }

 private:
  void add(
      const Kernel& kernel, const std::string& name, libkineto::ActivityType type, int32_t device, int32_t resource,
      const libkineto::ITraceActivity* operation) {
    buffer_->emplace_activity(buffer_->span, type, name);
    auto& activity = *buffer_->activities.back();
    activity.startTime = kernel.start;
    activity.endTime = kernel.end;
    activity.id = static_cast<int32_t>(kernel.correlation);
    activity.device = device;
    activity.resource = resource;
    activity.threadId = static_cast<int32_t>(kernel.host_thread);
    activity.linked = operation;
    activity.flow.id = static_cast<uint32_t>(kernel.correlation);
    activity.flow.type = libkineto::kLinkAsyncCpuGpu;
    activity.flow.start = 0;
    activity.addMetadata("correlation", kernel.correlation);
    if (operation != nullptr)
      activity.addMetadata("External id", operation->correlationId());
  }

  int64_t started_ = 0, ended_ = 0;
  std::vector<Kernel> kernels_;
  std::unique_ptr<libkineto::CpuTraceBuffer> buffer_;
};

class TraceSource final : public libkineto::IActivityProfiler {
 public:
  const std::string& name() const override {
    return name_;
  }
  const std::set<libkineto::ActivityType>& availableActivities() const override {
    return activities_;
  }
  std::unique_ptr<libkineto::IActivityProfilerSession> configure(
      const std::set<libkineto::ActivityType>& wanted, const libkineto::Config&) override {
    return wanted.count(libkineto::ActivityType::PRIVATEUSE1_RUNTIME) ? std::make_unique<TraceSession>() : nullptr;
  }
  std::unique_ptr<libkineto::IActivityProfilerSession> configure(
      int64_t, int64_t, const std::set<libkineto::ActivityType>& wanted, const libkineto::Config& config) override {
    return configure(wanted, config);
  }

 private:
  std::string name_ = "simulated";
  std::set<libkineto::ActivityType> activities_ = {
      libkineto::ActivityType::CONCURRENT_KERNEL, libkineto::ActivityType::GPU_MEMCPY, libkineto::ActivityType::PRIVATEUSE1_RUNTIME};
};
REGISTER_PRIVATEUSE1_PROFILER(TraceSource);
#endif

void set_up() {
  static auto* hooks = new Hooks();
  at::RegisterPrivateUse1HooksInterface(hooks);
  c10::SetAllocator(TYPE, &allocator());
}

} // namespace simulated

// The functions that tests call with ctypes.
extern "C" {
void simulated_set_up() {
  simulated::set_up();
}
void simulated_plan(int64_t launch_ns, int64_t event_ns, double ns_per_mac, double ns_per_byte) {
  std::lock_guard<std::mutex> lock(simulated::state_mutex);
  auto& plan = simulated::plan;
  plan.launch_ns = launch_ns;
  plan.event_ns = event_ns;
  plan.ns_per_mac = ns_per_mac;
  plan.ns_per_byte = ns_per_byte;
}
void simulated_plan_kernel(const char* name, int64_t nanoseconds) {
  std::lock_guard<std::mutex> lock(simulated::state_mutex);
  simulated::plan.kernels[name] = nanoseconds;
}
void simulated_forget_planned_kernels() {
  std::lock_guard<std::mutex> lock(simulated::state_mutex);
  simulated::plan.kernels.clear();
}
void simulated_plan_device(int device, double slower, int64_t limit) {
  std::lock_guard<std::mutex> lock(simulated::state_mutex);
  simulated::plan.slower.at(device) = slower;
  simulated::plan.limit.at(device) = limit;
}
void simulated_plan_events(int timed) {
  simulated::plan.timed_events = timed != 0;
}
void simulated_follow_real_clock(int follows) {
  simulated::follows_real_clock = follows != 0;
}
int64_t simulated_now() {
  return simulated::host_now();
}
void simulated_host_works(int64_t nanoseconds) {
  simulated::host_works(nanoseconds);
}
void simulated_aside(int aside) {
  simulated::within_fallback = aside != 0;
}
int64_t simulated_busy_until(int device) {
  std::lock_guard<std::mutex> lock(simulated::state_mutex);
  return std::max(simulated::stream_now(device).busy_until, simulated::host_now());
}
void simulated_launch(const char* name, int device, int64_t nanoseconds) {
  simulated::launch(simulated::stream_now(device), name, static_cast<double>(nanoseconds), nullptr);
}
int64_t simulated_synchronisations() {
  return simulated::synchronisations;
}
int64_t simulated_copies_to_host() {
  return simulated::copies_to_host;
}
void simulated_forget_kernels() {
  std::lock_guard<std::mutex> lock(simulated::state_mutex);
  simulated::kernels_log.clear();
}
// Return one line for each kernel: name, device, stream, start, end and thread of the host. The
// text is valid until the next call.
const char* simulated_kernels() {
  static std::string text;
  std::ostringstream lines;
  std::lock_guard<std::mutex> lock(simulated::state_mutex);
  for (const auto& kernel : simulated::kernels_log)
    lines << kernel.name << '\t' << kernel.device << '\t' << kernel.stream << '\t' << kernel.start << '\t' << kernel.end << '\t'
          << kernel.host_thread << '\n';
  text = lines.str();
  return text.c_str();
}
}

// Two CUDA devices on host memory. Tensors, dispatch and autograd are as on real ones, arithmetic is by the CPU's kernels.
//
// It shows what a run on the CPU cannot: operators over tensors of two devices, memory that nobody wrote, what is allocated and
// when it is freed, who waits for which device, how long work takes that is only launched (in virtual time), and a context that is
// lost by an index out of range. It shows neither a kernel's own numerics nor races.

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_scaled_dot_product_attention_math.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <mutex>
#include <optional>
#include <set>

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::IntArrayRef;

namespace {

constexpr auto kType = c10::DeviceType::CUDA;
constexpr DeviceIndex kCards = 2;
constexpr size_t kHeader = 64;  // before each block: its size and card, and the alignment of what follows

thread_local DeviceIndex current = 0;

struct Card {
  std::atomic<int64_t> launches{0}, uploads{0}, downloads{0}, waits{0}, used_bytes{0}, peak_bytes{0};
  std::atomic<int64_t> limit_bytes{std::numeric_limits<int64_t>::max()};
  double done_s = 0;  // when everything that was launched is done, in virtual time
} cards[kCards];

std::atomic<bool> lost{false};
std::atomic<int> waiting{0};  // allowed; refused, as by torch.cuda.set_sync_debug_mode; or it loses a card whose stream is captured
std::mutex clock_lock;
double now_s = 0, launch_s = 0;

DeviceIndex index_of(Device device) { return device.has_index() ? device.index() : current; }

void check_context() {
  TORCH_CHECK(!lost, "CUDA error: device-side assert triggered (simulated)");
}

void launch(DeviceIndex index) {
  check_context();
  ++cards[index].launches;
  std::lock_guard<std::mutex> held(clock_lock);
  cards[index].done_s = std::max(cards[index].done_s, now_s) + launch_s;
}

void wait_for(DeviceIndex index) {
  TORCH_CHECK(waiting != 1, "called a synchronizing CUDA operation (simulated)");
  lost = lost || waiting == 2;
  ++cards[index].waits;
  {
    std::lock_guard<std::mutex> held(clock_lock);
    now_s = std::max(now_s, cards[index].done_s);
  }
  check_context();
}

void take(DeviceIndex index, int64_t bytes) {
  Card& card = cards[index];
  if (card.used_bytes + bytes > card.limit_bytes)
    throw c10::OutOfMemoryError({__func__, __FILE__, __LINE__}, "CUDA out of memory (simulated)");
  int64_t used = card.used_bytes += bytes, peak = card.peak_bytes;
  while (used > peak && !card.peak_bytes.compare_exchange_weak(peak, used)) {}
}

// -- what torch asks of a device

struct Guard final : c10::impl::DeviceGuardImplInterface {
  using Stream = c10::Stream;
  c10::DeviceType type() const override { return kType; }
  Device getDevice() const override { return {kType, current}; }
  void setDevice(Device device) const override { current = index_of(device); }
  void uncheckedSetDevice(Device device) const noexcept override { current = index_of(device); }
  Device exchangeDevice(Device device) const override {
    Device before = getDevice();
    setDevice(device);
    return before;
  }
  DeviceIndex deviceCount() const noexcept override { return kCards; }
  Stream getStream(Device device) const override { return Stream(Stream::DEFAULT, {kType, index_of(device)}); }
  Stream getDefaultStream(Device device) const override { return getStream(device); }
  Stream exchangeStream(Stream stream) const override { return getStream(stream.device()); }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream& stream) const override { wait_for(stream.device_index()); }
  void synchronizeDevice(const DeviceIndex index) const override { wait_for(index); }
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}

  struct Event { DeviceIndex index; double done_s; };
  static Event& at(void* event) { return *static_cast<Event*>(event); }
  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event;
    std::lock_guard<std::mutex> held(clock_lock);
    at(*event) = {stream.device_index(), std::max(now_s, cards[stream.device_index()].done_s)};
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void* event) const override { return at(event).done_s <= now_s; }
  void synchronizeEvent(void* event) const override { wait_for(at(event).index); }
  double elapsedTime(void* first, void* second, const DeviceIndex) const override {
    return 1e3 * (at(second).done_s - at(first).done_s);
  }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return kCards; }
  DeviceIndex getCurrentDevice() const override { return current; }
  Device getDeviceFromPtr(void* data) const override {
    return {kType, static_cast<DeviceIndex>(reinterpret_cast<int64_t*>(static_cast<char*>(data) - kHeader)[1])};
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(c10::kCPU); }
  void deviceSynchronize(DeviceIndex index) const override { wait_for(index); }
};
const Hooks hooks;
const bool hooked = [] {  // torch keeps the hooks that it made at its start; they have no state, so that other answers can be put in
  const void* theirs = &at::detail::getCUDAHooks();
  std::memcpy(const_cast<void*>(theirs), &hooks, sizeof(void*));
  return true;
}();

// -- memory: what nobody wrote is NaN

struct CardAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    check_context();
    take(current, static_cast<int64_t>(bytes));
    char* block = static_cast<char*>(std::aligned_alloc(kHeader, (bytes + 2 * kHeader - 1) / kHeader * kHeader));
    reinterpret_cast<int64_t*>(block)[0] = static_cast<int64_t>(bytes);
    reinterpret_cast<int64_t*>(block)[1] = current;
    std::memset(block + kHeader, 0xFF, bytes);
    return {block + kHeader, block, &release, Device(kType, current)};
  }
  static void release(void* block) {
    const int64_t* header = static_cast<int64_t*>(block);
    cards[header[1]].used_bytes -= header[0];
    std::free(block);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
} allocator;
REGISTER_ALLOCATOR(kType, &allocator)

// A tensor's memory, seen as the other device's.
Tensor seen_as(const Tensor& tensor, c10::DataPtr memory, c10::Allocator* owner, c10::DispatchKey key) {
  c10::Storage storage(c10::Storage::use_byte_size_t(), tensor.storage().nbytes(), std::move(memory), owner, true);
  auto seen = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), tensor.dtype());
  seen.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.is_conj()) seen._set_conj(true);
  if (tensor.is_neg()) seen._set_neg(true);
  return seen;
}

Tensor on_host(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  void* data = const_cast<void*>(tensor.storage().data());
  return seen_as(tensor, {data, Device(c10::kCPU)}, c10::GetAllocator(c10::kCPU), c10::DispatchKey::CPU);
}

struct Result { Tensor tensor; DeviceIndex index; int64_t bytes; };

Tensor on_card(const Tensor& tensor, DeviceIndex index) {
  if (!tensor.defined() || !tensor.is_cpu()) return tensor;
  auto bytes = static_cast<int64_t>(tensor.storage().nbytes());
  take(index, bytes);
  c10::DataPtr memory(const_cast<void*>(tensor.storage().data()), new Result{tensor, index, bytes},
      [](void* kept) {
        auto* result = static_cast<Result*>(kept);
        cards[result->index].used_bytes -= result->bytes;
        delete result;
      }, Device(kType, index));
  return seen_as(tensor, std::move(memory), &allocator, c10::DispatchKey::CUDA);
}

// -- arithmetic: any operator, by the CPU's kernel on the same memory

bool is_any(const std::string& name, std::initializer_list<const char*> names) {
  return std::any_of(names.begin(), names.end(), [&](const char* one) { return name == one; });
}
bool waits(const std::string& name) {  // their results' sizes, or values, are known to the host afterwards
  return is_any(name, {"aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::bincount", "aten::equal",
      "aten::unique_consecutive", "aten::repeat_interleave", "aten::linalg_qr", "aten::is_nonzero"});
}
bool takes_host_indices(const std::string& name) {
  return is_any(name, {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"});
}

template <typename F>
void each_tensor(const c10::IValue& value, F&& visit) {
  if (value.isTensor()) visit(value.toTensor());
  else if (value.isTensorList()) for (const Tensor& tensor : value.toTensorVector()) visit(tensor);
  else if (value.isOptionalTensorList())
    for (std::optional<Tensor> tensor : value.toOptionalTensorList()) if (tensor) visit(*tensor);
}

template <typename F>
c10::IValue map_tensors(const c10::IValue& value, F&& change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& tensor : value.toTensorVector()) list.push_back(change(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (std::optional<Tensor> tensor : value.toOptionalTensorList())
      list.push_back(tensor ? std::optional<Tensor>(change(*tensor)) : tensor);
    return list;
  }
  return value;
}

DeviceIndex common_card(const std::string& name, const std::vector<c10::IValue>& arguments) {
  std::set<DeviceIndex> found;
  bool mixed = false;
  for (const auto& argument : arguments) {
    each_tensor(argument, [&](const Tensor& tensor) {
      if (!tensor.defined()) return;
      if (tensor.is_cuda()) found.insert(tensor.device().index());
      else mixed |= tensor.dim() > 0 && !takes_host_indices(name);
    });
  }
  TORCH_CHECK(found.size() <= 1 && !(mixed && !found.empty()),
      "Expected all tensors to be on the same device, but ", name, " found at least two devices (simulated)");
  if (!found.empty()) return *found.begin();
  for (const auto& argument : arguments)
    if (argument.isDevice() && argument.toDevice().is_cuda()) return index_of(argument.toDevice());
  return current;
}

void call_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  try {
    op.callBoxed(stack);
  } catch (const c10::Error& error) {  // where the CPU's kernel refuses an index, a card's has asserted and lost its context
    const std::string text = error.what();
    lost = lost || dynamic_cast<const c10::IndexError*>(&error) || text.find("out of bounds") != std::string::npos ||
        text.find("out of range") != std::string::npos;
    check_context();
    throw;
  }
}

// What an argument that was written to has become; an `out` may have been given another size.
Tensor written(const Tensor& original, const Tensor& result) {
  if (result.sizes() != original.sizes()) {
    c10::DeviceGuard guard(original.device());
    at::native::resize_impl_cpu_(original.unsafeGetTensorImpl(), result.sizes(), std::nullopt);
    on_host(original).copy_(result);
  }
  return original;
}

void compute(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const std::string& name = schema.name();
  const size_t count = schema.arguments().size();
  const std::vector<c10::IValue> arguments(stack->end() - count, stack->end());
  const DeviceIndex index = common_card(name, arguments);
  launch(index);
  if (waits(name)) wait_for(index);
  for (size_t i = 0; i < count; ++i) {
    auto& value = (*stack)[stack->size() - count + i];
    if (value.isDevice()) value = Device(c10::kCPU);
    else value = map_tensors(value, on_host);
  }
  call_on_host(op, stack);
  const auto& returns = schema.returns();
  for (size_t r = 0; r < returns.size(); ++r) {
    auto& value = (*stack)[stack->size() - returns.size() + r];
    const auto* alias = returns[r].alias_info();
    const c10::IValue* target = nullptr;
    for (size_t i = 0; alias && alias->isWrite() && i < count; ++i) {
      const auto* own = schema.arguments()[i].alias_info();
      if (own && own->beforeSets() == alias->beforeSets() && arguments[i].isTensor()) target = &arguments[i];
    }
    if (target && target->toTensor().is_cuda()) value = written(target->toTensor(), value.toTensor());
    else value = map_tensors(value, [&](const Tensor& tensor) { return on_card(tensor, index); });
  }
}

// -- what is not arithmetic

using Dtype = std::optional<at::ScalarType>;

Tensor empty(IntArrayRef size, Dtype dtype, std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>,
             std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(Device(kType, index_of(device.value_or(Device(kType)))));
  return at::detail::empty_generic(size, &allocator, c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype), format);
}
Tensor empty_strided(IntArrayRef size, IntArrayRef stride, Dtype dtype, std::optional<at::Layout>, std::optional<Device> device,
                     std::optional<bool>) {
  c10::DeviceGuard guard(Device(kType, index_of(device.value_or(Device(kType)))));
  return at::detail::empty_strided_generic(size, stride, &allocator, c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype));
}
Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  const DeviceIndex index = (self.is_cuda() ? self : source).device().index();
  launch(index);
  if (!source.is_cuda()) ++cards[index].uploads;
  if (!self.is_cuda()) ++cards[index].downloads;
  if (source.is_cuda() != self.is_cuda() && !non_blocking) wait_for(index);
  Tensor to = on_host(self);
  to.copy_(on_host(source));
  return self;
}
at::Scalar read_scalar(const Tensor& self) {
  ++cards[self.device().index()].downloads;
  wait_for(self.device().index());
  return on_host(self).item();
}
Tensor& set_storage(Tensor& self, at::Storage source, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(source);
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return self;
}
const Tensor& resize_(const Tensor& self, IntArrayRef size, std::optional<at::MemoryFormat>) {
  c10::DeviceGuard guard(self.device());
  at::native::resize_impl_cpu_(self.unsafeGetTensorImpl(), size, std::nullopt);
  return self;
}
Tensor reshape_alias(const Tensor& self, IntArrayRef size, IntArrayRef stride) {
  return at::native::as_strided_tensorimpl(self, size, stride, self.storage_offset());
}
Tensor attention(const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask, double dropout,
                 bool is_causal, std::optional<double> scale, bool grouped) {
  std::optional<Tensor> bias = mask;
  if (mask && mask->scalar_type() == at::kBool)
    bias = at::where(*mask, at::zeros_like(*mask, query.options()), -std::numeric_limits<double>::infinity());
  return std::get<0>(
      at::_scaled_dot_product_attention_math(query, key, value, bias, dropout, is_causal, std::nullopt, scale, grouped));
}
Tensor histc(const Tensor& self, int64_t bins, const at::Scalar& least, const at::Scalar& most) {  // the CPU has none of integers
  launch(self.device().index());
  const Tensor counts = on_host(self).to(at::kFloat).histc(bins, least, most).to(self.scalar_type());
  return on_card(counts, self.device().index());
}

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&compute>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("as_strided", at::native::as_strided_tensorimpl);
  library.impl("view", at::native::view);
  library.impl("unfold", at::native::unfold);  // a view holds the memory that it sees: repeat relies on that
  library.impl("_reshape_alias", reshape_alias);
  library.impl("copy_", copy_);
  library.impl("_local_scalar_dense", read_scalar);
  library.impl("set_.source_Storage_storage_offset", set_storage);
  library.impl("resize_", resize_);
  library.impl("scaled_dot_product_attention", attention);
  library.impl("histc", histc);
}
TORCH_LIBRARY_IMPL(aten, AutogradCUDA, library) { library.impl("scaled_dot_product_attention", attention); }

}  // namespace

extern "C" {

void card_counts(int card, int64_t* counts) {  // in the order of `Counts` (simulated.py)
  const Card& one = cards[card];
  int place = 0;
  for (const auto* count : {&one.launches, &one.uploads, &one.downloads, &one.waits, &one.used_bytes, &one.peak_bytes})
    counts[place++] = *count;
}
void card_reset(int card) {
  Card& one = cards[card];
  for (auto* count : {&one.launches, &one.uploads, &one.downloads, &one.waits}) *count = 0;
  one.peak_bytes = one.used_bytes.load();
}
void card_launched(int card, int64_t launches) { cards[card].launches = launches; }
void card_limit(int card, int64_t bytes) { cards[card].limit_bytes = bytes; }
void card_lose(int is_lost) { lost = is_lost != 0; }
void card_waiting(int how) { waiting = how; }
void card_pace(double seconds) { launch_s = seconds; }
double card_now() { return now_s; }
int card_current() { return current; }
void card_use(int card) { current = static_cast<DeviceIndex>(card); }
}

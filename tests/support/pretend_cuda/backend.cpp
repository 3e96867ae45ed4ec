// A CUDA backend for PyTorch whose device memory is main memory. `__init__.py` says what it is for.
//
// A device tensor has the CUDA dispatch key, and a storage that says "cuda:i" over memory of the
// CPU allocator. PyTorch's CPU build has no CUDA kernels, so operations reach `run_on_host`, which
// calls the CPU kernel on CPU tensors over the same memory. It refuses operands on several devices
// with the words of CUDA, and reports what CUDA would have launched or waited for.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/ApproximateClock.h>
#include <torch/csrc/profiler/stubs/base.h>
#include <torch/library.h>

#include <array>
#include <atomic>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace {

using at::Device;
using at::Tensor;
using c10::DeviceIndex;
using c10::IValue;
using c10::Storage;

constexpr DeviceIndex DEVICE_COUNT = 2;

// As in CUDA, every thread has a current device of its own, at first device 0.
thread_local DeviceIndex current_device = 0;

struct MemoryMeter {
  std::atomic<int64_t> bytes{0};
  std::atomic<int64_t> peak_bytes{0};

  void add(int64_t count) {
    int64_t now = bytes += count;
    int64_t peak = peak_bytes;
    while (now > peak && !peak_bytes.compare_exchange_weak(peak, now)) {
    }
  }
};

std::array<MemoryMeter, DEVICE_COUNT> memory_meters;

// Called with an event's kind ("kernel", "copy" or "sync") and the operation.
using Listener = void (*)(const char* kind, const char* operation);
std::atomic<Listener> listener{nullptr};

void report(const char* kind, const std::string& operation) {
  if (Listener call = listener.load()) call(kind, operation.c_str());
}

// The work of a CUDA graph, in order. As on CUDA, capturing leaves the memory as it was: an operation
// has to run so that its results have sizes, so what it overwrites is saved and restored.
struct Graph {
  std::vector<std::function<void()>> work;
  std::vector<std::pair<Tensor, Tensor>> saved;  // (host alias of a whole storage, its copy)
  std::set<void*> known;  // addresses of storages that are saved, or that the graph made
};

std::map<int64_t, Graph> graphs;
thread_local Graph* capturing = nullptr;

void refuse_while_capturing(const std::string& operation) {
  TORCH_CHECK(!capturing, "operation not permitted when stream is capturing (", operation, ")");
}

// What a device storage owns: the host memory under it.
struct DeviceAllocation {
  Storage host;
  DeviceIndex device;
  int64_t bytes;
};

void free_allocation(void* context) {
  auto* allocation = static_cast<DeviceAllocation*>(context);
  memory_meters[allocation->device].bytes -= allocation->bytes;
  delete allocation;
}

Storage make_device_storage(const Storage& host, Device device) {
  const auto bytes = static_cast<int64_t>(host.nbytes());
  memory_meters[device.index()].add(bytes);
  auto* allocation = new DeviceAllocation{host, device.index(), bytes};
  c10::DataPtr data(host.mutable_data(), allocation, &free_allocation, device);
  return Storage(Storage::use_byte_size_t(), bytes, std::move(data), nullptr, /*resizable=*/false);
}

void copy_layout(const Tensor& target, const Tensor& source) {
  target.unsafeGetTensorImpl()->set_sizes_and_strides(
      source.sizes(), source.strides(), source.storage_offset());
}

Tensor make_tensor_over(Storage storage, const Tensor& like, c10::DispatchKey key) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(key), like.dtype());
  copy_layout(tensor, like);
  return tensor;
}

// Return a CPU tensor over the memory of a device tensor.
Tensor alias_on_host(const Tensor& device_tensor) {
  auto* owner = new Storage(device_tensor.storage());
  auto release = [](void* context) { delete static_cast<Storage*>(context); };
  c10::DataPtr data(owner->mutable_data(), owner, release, at::kCPU);
  Storage storage(Storage::use_byte_size_t(), owner->nbytes(), std::move(data),
                  c10::GetAllocator(at::kCPU), /*resizable=*/true);
  auto alias = make_tensor_over(std::move(storage), device_tensor, c10::DispatchKey::CPU);
  if (device_tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    alias.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return alias;
}

// Save the memory of a device tensor that a captured operation is about to overwrite.
void save_while_capturing(const Tensor& tensor) {
  if (!capturing || !tensor.defined() || !tensor.is_cuda() || !tensor.storage().nbytes()) return;
  if (!capturing->known.insert(tensor.storage().mutable_data()).second) return;
  auto alias = alias_on_host(tensor);
  const auto bytes = static_cast<int64_t>(tensor.storage().nbytes());
  Tensor whole = at::from_blob(tensor.storage().mutable_data(), {bytes}, at::kByte);
  capturing->saved.emplace_back(whole, whole.clone());
}

// A generator of the device. `host` draws its numbers, so they equal the CPU's.
struct DeviceGenerator final : at::CPUGeneratorImpl {
  at::Generator host = at::detail::createCPUGenerator();

  explicit DeviceGenerator(DeviceIndex index) { device_ = Device(at::kCUDA, index); }
  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
};

// One operation on device tensors, while the CPU kernel runs it.
class HostCall {
 public:
  explicit HostCall(const std::string& operation)
      : operation_(operation),
        is_index_put_(operation.rfind("aten::index_put", 0) == 0 ||
                      operation == "aten::_index_put_impl_"),
        // Index tensors may lie on the host: CUDA brings them to the device, and waits.
        takes_host_indices_(is_index_put_ || operation == "aten::index") {}

  // Note the device of the operands. Raise an error if they are on several.
  void check_device(const IValue& value) {
    if (value.isDevice() && value.toDevice().is_cuda()) {
      const Device named = value.toDevice();
      device_ = Device(at::kCUDA, named.has_index() ? named.index() : current_device);
    }
    map_tensors(value, [this](const Tensor& tensor) {
      if (tensor.defined() && tensor.is_cuda()) {
        TORCH_CHECK(device_.is_cpu() || device_ == tensor.device(),
                    "Expected all tensors to be on the same device, but found at least two "
                    "devices, ", device_, " and ", tensor.device(), "! (in ", operation_, ")");
        device_ = tensor.device();
      }
      return tensor;
    });
  }

  // Return an argument for the CPU kernel.
  IValue lower(const IValue& value) {
    if (value.isDevice() && value.toDevice().is_cuda()) return Device(at::kCPU);
    if (value.isGenerator()) {
      auto* generator =
          dynamic_cast<DeviceGenerator*>(value.toGenerator().unsafeGetGeneratorImpl());
      TORCH_CHECK(generator, "Expected a 'cuda' device type for generator but found 'cpu' (in ",
                  operation_, ")");
      return generator->host;
    }
    return map_tensors(value, [this](const Tensor& tensor) { return lower_tensor(tensor); });
  }

  // Return a result of the CPU kernel as a tensor of the device.
  IValue raise(const IValue& value) {
    return map_tensors(value, [this](const Tensor& tensor) { return raise_tensor(tensor); });
  }

  // Give device tensors the memory and the sizes that the CPU kernel gave their aliases.
  void apply_resizes() {
    for (auto& [tensor, alias] : operands_) {
      if (tensor.storage().data() != alias.storage().data()) {
        tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(
            make_device_storage(alias.storage(), device_));
      }
      if (tensor.sizes() != alias.sizes() || tensor.strides() != alias.strides()) {
        copy_layout(tensor, alias);
      }
    }
  }

  bool waits() const { return waits_; }

  // True unless the operation only made views.
  bool computes() const { return writes_operand_ || !returns_view_; }

 private:
  Tensor lower_tensor(const Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    // The number of true elements decides sizes, so CUDA waits for it.
    const bool is_mask = tensor.scalar_type() == at::kBool && !operands_.empty();
    waits_ |= is_index_put_ && is_mask;
    if (!tensor.is_cuda()) {
      const bool is_scalar = tensor.dim() == 0;
      waits_ |= takes_host_indices_ && !is_scalar;
      TORCH_CHECK(is_scalar || device_.is_cpu() || takes_host_indices_,
                  "Expected all tensors to be on the same device, but found at least two "
                  "devices, ", device_, " and cpu! (in ", operation_, ", a tensor of ",
                  tensor.sizes(), ")");
      return tensor;
    }
    for (auto& [operand, alias] : operands_) {
      if (operand.is_same(tensor)) return alias;
    }
    operands_.emplace_back(tensor, alias_on_host(tensor));
    return operands_.back().second;
  }

  Tensor raise_tensor(const Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cpu()) return tensor;
    for (auto& [operand, alias] : operands_) {
      if (tensor.is_same(alias)) {
        writes_operand_ = true;
        return operand;
      }
    }
    for (auto& [operand, alias] : operands_) {
      if (tensor.storage().nbytes() && tensor.storage().data() == alias.storage().data()) {
        returns_view_ = true;
        auto view = at::detail::make_tensor<c10::TensorImpl>(
            c10::TensorImpl::VIEW, Storage(operand.storage()), operand.key_set(), tensor.dtype());
        copy_layout(view, tensor);
        return view;
      }
    }
    return make_tensor_over(make_device_storage(tensor.storage(), device_), tensor,
                            c10::DispatchKey::CUDA);
  }

  template <class Function>
  static IValue map_tensors(const IValue& value, Function function) {
    if (value.isTensor()) return function(value.toTensor());
    if (value.isTensorList()) {
      c10::List<Tensor> tensors;
      for (const Tensor& tensor : value.toTensorList()) tensors.push_back(function(tensor));
      return tensors;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> tensors;
      for (std::optional<Tensor> tensor : value.toOptionalTensorList()) {
        tensors.push_back(tensor ? std::optional<Tensor>(function(*tensor)) : tensor);
      }
      return tensors;
    }
    return value;
  }

  const std::string& operation_;
  const bool is_index_put_;
  const bool takes_host_indices_;
  Device device_ = at::kCPU;
  bool waits_ = false;
  bool writes_operand_ = false;
  bool returns_view_ = false;
  std::vector<std::pair<Tensor, Tensor>> operands_;  // (device tensor, its alias on the host)
};

// Call an operation on the host. The stack has its arguments, and then its results.
HostCall call_on_host(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  const auto& schema = operation.schema();
  HostCall call(schema.name());
  auto arguments = torch::jit::pop(*stack, schema.arguments().size());
  for (const auto& argument : arguments) call.check_device(argument);
  for (const auto& argument : arguments) stack->push_back(call.lower(argument));
  operation.callBoxed(stack);
  call.apply_resizes();
  auto results = torch::jit::pop(*stack, schema.returns().size());
  for (const auto& result : results) stack->push_back(call.raise(result));
  return call;
}

// Copy a result of a replayed operation into the memory that the captured one gave it.
void copy_result(const Tensor& captured, const Tensor& replayed) {
  if (!captured.defined() || !captured.is_cuda()) return;
  if (captured.data_ptr() == replayed.data_ptr()) return;
  TORCH_CHECK(captured.sizes() == replayed.sizes(), "a replayed operation has another shape");
  alias_on_host(captured).copy_(alias_on_host(replayed));
}

void copy_results(const IValue& captured, const IValue& replayed) {
  if (captured.isTensor()) copy_result(captured.toTensor(), replayed.toTensor());
  if (!captured.isTensorList()) return;
  const auto targets = captured.toTensorVector(), sources = replayed.toTensorVector();
  for (size_t i = 0; i < targets.size(); i++) copy_result(targets[i], sources[i]);
}

void add_storages(const IValue& value, std::set<void*>& storages) {
  std::vector<Tensor> tensors;
  if (value.isTensor()) tensors = {value.toTensor()};
  if (value.isTensorList()) tensors = value.toTensorVector();
  for (const Tensor& tensor : tensors) {
    if (tensor.defined() && tensor.is_cuda()) storages.insert(tensor.storage().mutable_data());
  }
}

void capture(const c10::OperatorHandle& operation, torch::jit::Stack arguments,
             torch::jit::Stack results) {
  std::set<void*> given;
  for (const auto& argument : arguments) add_storages(argument, given);
  std::set<void*> returned;
  for (const auto& result : results) add_storages(result, returned);
  for (void* storage : returned) {
    if (!given.count(storage)) capturing->known.insert(storage);
  }
  capturing->work.push_back([operation, arguments, results] {
    torch::jit::Stack stack = arguments;
    call_on_host(operation, &stack);
    for (size_t i = 0; i < results.size(); i++) copy_results(results[i], stack[i]);
  });
}

void run_on_host(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  // Their results have sizes or values that the host needs.
  static const std::set<std::string> WAITING{
      "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal",
      "aten::bincount", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive"};
  const auto& schema = operation.schema();
  const std::string& name = schema.name();
  const bool allocates = name.rfind("aten::empty", 0) == 0;
  torch::jit::Stack arguments;
  if (capturing) {
    arguments = torch::jit::last(*stack, schema.arguments().size()).vec();
    for (size_t i = 0; i < arguments.size(); i++) {
      const auto* alias = schema.arguments()[i].alias_info();
      if (!alias || !alias->isWrite()) continue;
      if (arguments[i].isTensor()) save_while_capturing(arguments[i].toTensor());
      if (arguments[i].isTensorList()) {
        for (const Tensor& tensor : arguments[i].toTensorVector()) save_while_capturing(tensor);
      }
    }
  }
  const HostCall call = call_on_host(operation, stack);
  const bool reads_scalar = name == "aten::_local_scalar_dense";
  if (reads_scalar) report("copy", name);
  if (call.waits() || WAITING.count(name)) {
    refuse_while_capturing(name);
    report("sync", name);
  }
  if (capturing && !allocates) {
    capture(operation, std::move(arguments), torch::jit::last(*stack, schema.returns().size()).vec());
  }
  if (!allocates && !reads_scalar && call.computes()) report("kernel", name);
}

Tensor& copy_(Tensor& target, const Tensor& source, bool non_blocking) {
  const bool from_device = source.is_cuda();
  const bool to_device = target.is_cuda();
  auto copy = [](const Tensor& target, const Tensor& source) {
    (target.is_cuda() ? alias_on_host(target) : target)
        .copy_(source.is_cuda() ? alias_on_host(source) : source);
  };
  if (from_device && to_device) {
    save_while_capturing(target);
    if (capturing) capturing->work.push_back([copy, target, source] { copy(target, source); });
    copy(target, source);
    report("kernel", "aten::copy_");
    return target;
  }
  const char* direction = to_device ? "copy to the device" : "copy to the host";
  refuse_while_capturing(direction);
  copy(target, source);
  report("copy", direction);
  if (!non_blocking) report("sync", direction);
  return target;
}

const Tensor& resize_(const Tensor& tensor, c10::SymIntArrayRef sizes,
                      std::optional<at::MemoryFormat> format) {
  auto alias = alias_on_host(tensor);
  alias.resize__symint(sizes, format);
  if (alias.storage().data() != tensor.storage().data()) {
    tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(
        make_device_storage(alias.storage(), tensor.device()));
  }
  copy_layout(tensor, alias);
  return tensor;
}

TORCH_LIBRARY_IMPL(_, CUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("copy_", &copy_);
  library.impl("resize_", &resize_);
  // PyTorch's kernels for all devices would read offsets on the host, which CUDA's does not, or
  // look for kernels of CUDA.
  for (const char* name : {"_grouped_mm", "convolution", "convolution_backward"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
  }
}

// Streams and events do nothing: every operation has ended when its call returns.
struct DeviceGuard final : c10::impl::NoOpDeviceGuardImpl<at::kCUDA> {
  Device exchangeDevice(Device device) const override {
    Device previous = getDevice();
    setDevice(device);
    return previous;
  }
  Device getDevice() const override { return Device(at::kCUDA, current_device); }
  void setDevice(Device device) const override { uncheckedSetDevice(device); }
  void uncheckedSetDevice(Device device) const noexcept override {
    current_device = std::max<DeviceIndex>(0, device.index());
  }
  c10::Stream getStream(Device device) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, device.has_index() ? device : getDevice());
  }
  DeviceIndex deviceCount() const noexcept override { return DEVICE_COUNT; }
  void record(void**, const c10::Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};

C10_REGISTER_GUARD_IMPL(CUDA, DeviceGuard)

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return DEVICE_COUNT; }
  DeviceIndex deviceCount() const override { return DEVICE_COUNT; }
  DeviceIndex current_device() const override { return ::current_device; }
  DeviceIndex getCurrentDevice() const override { return ::current_device; }
  void setCurrentDevice(DeviceIndex device) const override { ::current_device = device; }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    return std::exchange(::current_device, device);
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return c10::GetAllocator(at::kCPU);
  }
  void deviceSynchronize(DeviceIndex) const override {
    refuse_while_capturing("synchronize");
    report("sync", "synchronize");
  }
  at::Generator getNewGenerator(DeviceIndex index) const override {
    return at::make_generator<DeviceGenerator>(index < 0 ? ::current_device : index);
  }
};

// The profiler's events of the device, which take no time. Without them PyTorch writes a warning
// with a stack for every operation.
struct ProfilerEvents final : torch::profiler::impl::ProfilerStubs {
  void record(DeviceIndex* device, torch::profiler::impl::ProfilerVoidEventStub* event,
              int64_t* cpu_ns) const override {
    if (device) *device = current_device;
    if (cpu_ns) *cpu_ns = c10::getTime();
    *event = std::make_shared<int>(0);
  }
  float elapsed(const torch::profiler::impl::ProfilerVoidEventStub*,
                const torch::profiler::impl::ProfilerVoidEventStub*) const override {
    return 0;
  }
  void mark(const char*) const override {}
  void rangePush(const char*) const override {}
  void rangePop() const override {}
  bool enabled() const override { return true; }
  void onEachDevice(std::function<void(int)> call) const override {
    for (int device = 0; device < DEVICE_COUNT; device++) call(device);
  }
  void synchronize() const override {}
};

ProfilerEvents profiler_events;
const bool has_profiler_events =
    (torch::profiler::impl::registerCUDAMethods(&profiler_events), true);

}  // namespace

namespace at {
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, Hooks)
}  // namespace at

extern "C" {
int64_t pretend_device_count() { return DEVICE_COUNT; }
int64_t pretend_memory_bytes(int64_t device) { return memory_meters[device].bytes; }
int64_t pretend_peak_memory_bytes(int64_t device) { return memory_meters[device].peak_bytes; }
void pretend_reset_peak_memory(int64_t device) {
  memory_meters[device].peak_bytes = memory_meters[device].bytes.load();
}
int64_t pretend_current_device() { return current_device; }
void pretend_set_device(int64_t device) { current_device = static_cast<DeviceIndex>(device); }
void pretend_begin_capture(int64_t graph) { capturing = &graphs[graph]; }
void pretend_end_capture() {
  for (auto& [whole, copy] : capturing->saved) whole.copy_(copy);
  capturing->saved.clear();
  capturing = nullptr;
}
void pretend_replay(int64_t graph) {
  c10::InferenceMode guard;
  report("kernel", "graph");
  for (auto& work : graphs.at(graph).work) work();
}
void pretend_drop_graph(int64_t graph) { graphs.erase(graph); }
void pretend_listen(Listener function) { listener = function; }
}

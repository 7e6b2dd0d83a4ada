// The smallest second device: the host's memory under another name, for tests.
//
// Every operation runs on the CPU's kernels (PyTorch's fallback for new backends), but first its arguments must be on
// this device, as on a real one. The device has a generator of its own and counts how often the host waits for a number,
// also for the size of an operation's result.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <set>
#include <string>

namespace {

using at::Tensor;
using c10::IntArrayRef;
constexpr auto SECOND = c10::DeviceType::PrivateUse1;

// One device and one stream, on which everything has happened as soon as it is called.
struct Guard : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return SECOND; }
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
  c10::Device getDevice() const override { return c10::Device(SECOND, 0); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void** event, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override { *event = this_(); }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, c10::DeviceIndex) const noexcept override {}
  void* this_() const { return const_cast<Guard*>(this); }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct HostMemory : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = bytes ? std::aligned_alloc(64, (bytes + 63) / 64 * 64) : nullptr;
    return {data, data, &std::free, c10::Device(SECOND, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, size_t count) const override { std::memcpy(to, from, count); }
} memory;

struct Hooks : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
} hooks;

thread_local bool falling_back = false;
int64_t waits = 0;

at::Generator& chance() {
  static at::Generator own = at::detail::createCPUGenerator(0);
  return own;
}

// The same memory as a tensor of the CPU.
Tensor host(const Tensor& t) {
  if (!t.defined() || t.is_cpu()) return t;
  return at::from_blob(t.data_ptr(), t.sizes(), t.strides(), t.options().device(at::kCPU));
}

Tensor home(const Tensor& t) { return t.defined() ? t.to(c10::Device(SECOND, 0)) : t; }

// Memory -------------------------------------------------------------------------------------------------------------

Tensor empty(IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return Tensor(at::detail::empty_generic(size, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                          c10::dtype_or_default(dtype), format));
}

Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return Tensor(at::detail::empty_strided_generic(size, stride, &memory,
                                                  c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                                  c10::dtype_or_default(dtype)));
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool) {
  if (!falling_back && to.is_cpu()) ++waits;
  host(to).copy_(host(from));
  return to;
}

Tensor copy_and_resize(const Tensor& from, const Tensor& to) {
  if (to.sizes() != from.sizes()) {
    size_t bytes = from.numel() * to.dtype().itemsize();
    if (to.storage().nbytes() < bytes) {
      to.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(memory.allocate(bytes));
      to.storage().unsafeGetStorageImpl()->set_nbytes(bytes);
    }
    to.unsafeGetTensorImpl()->set_sizes_contiguous(from.sizes());
  }
  return copy_from(from, to, false);
}

c10::Scalar number(const Tensor& t) {
  if (!falling_back) ++waits;
  return host(t).item();
}

// Everything else ----------------------------------------------------------------------------------------------------

void refuse_others(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  static const std::set<std::string> MIXED = {"aten::index", "aten::index_put", "aten::index_put_",
                                              "aten::_index_put_impl_"};  // indices may be elsewhere, as on CUDA
  if (MIXED.count(op.schema().name())) return;
  auto refuse = [&](const Tensor& t) {
    TORCH_CHECK(!t.defined() || !t.is_cpu() || t.dim() == 0,
                "Expected all tensors to be on the same device, but found cpu and second in ", op.schema().name());
  };
  auto arguments = op.schema().arguments().size();
  for (size_t i = stack.size() - arguments; i < stack.size(); ++i) {
    const auto& value = stack[i];
    if (value.isTensor()) refuse(value.toTensor());
    if (value.isTensorList())
      for (const Tensor& t : value.toTensorList()) refuse(t);
    if (op.schema().arguments()[i + arguments - stack.size()].name() == "generator" && !value.isNone())
      TORCH_CHECK(false, "Expected a 'second' device type for generator but found 'cpu'");
  }
}

// Whether CUDA's host would wait in this operation, because values decide the size of its result. Not complete. Reading
// at a mask calls `nonzero`.
bool sized_by_values(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  static const std::set<std::string> ALWAYS = {"aten::nonzero", "aten::masked_select", "aten::equal", "aten::bincount",
                                               "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive"};
  if (ALWAYS.count(op.schema().name())) return true;
  if (op.schema().name() != "aten::_index_put_impl_") return false;
  auto arguments = torch::jit::last(stack, op.schema().arguments().size());
  if (arguments[2].toTensor().numel() == 1) return false;  // one number fills a mask
  for (const auto& index : arguments[1].toListRef())
    if (index.isTensor() && index.toTensor().scalar_type() == at::kBool) return true;
  return false;
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  refuse_others(op, *stack);
  if (!falling_back && sized_by_values(op, *stack)) ++waits;
  at::Generator usual = at::detail::getDefaultCPUGenerator();
  bool random = false;
  for (auto tag : op.getTags()) random = random || tag == at::Tag::nondeterministic_seeded;
  Tensor before = random ? usual.get_state() : Tensor();
  if (random) usual.set_state(chance().get_state());
  bool outer = falling_back;
  falling_back = true;
  at::native::cpu_fallback(op, stack);
  falling_back = outer;
  if (random) {
    chance().set_state(usual.get_state());
    usual.set_state(before);
  }
}

Tensor convolution(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, IntArrayRef stride,
                   IntArrayRef padding, IntArrayRef dilation, bool transposed, IntArrayRef output_padding,
                   int64_t groups) {
  std::optional<Tensor> offset = bias.has_value() ? std::optional<Tensor>(host(*bias)) : std::nullopt;
  return home(at::convolution(host(input), host(weight), offset, stride, padding, dilation, transposed,
                              output_padding, groups));
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& gradient, const Tensor& input, const Tensor& weight, IntArrayRef stride, IntArrayRef padding,
    IntArrayRef dilation, bool transposed, IntArrayRef output_padding, int64_t groups, std::array<bool, 3> mask) {
  std::vector<int64_t> bias = {weight.size(transposed ? 1 : 0)};
  auto found = at::convolution_backward(host(gradient), host(input), host(weight), at::OptionalIntArrayRef(bias),
                                        stride, padding, dilation, transposed, output_padding, groups, mask);
  return {home(std::get<0>(found)), home(std::get<1>(found)), home(std::get<2>(found))};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_and_resize);
  m.impl("_local_scalar_dense", number);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
  // The generic form of this one does not know channels_last.
  m.impl("native_group_norm", torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY(second, m) {
  m.def("waits", [] { return waits; });
  m.def("seed", [](int64_t seed) { chance().set_current_seed(static_cast<uint64_t>(seed)); });
  m.def("state", [] { return chance().get_state(); });
  m.def("set_state", [](const Tensor& state) { chance().set_state(state); });
}

struct Register {
  Register() {
    at::RegisterPrivateUse1HooksInterface(&hooks);
    c10::SetAllocator(SECOND, &memory);
  }
} now;

}  // namespace

// Matrix products, convolutions and attention that give memory of the right shape and compute nothing: what a step takes
// beside them (bench/training.py). In C++, since a stub in Python takes as long as many a kernel.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <optional>

using at::Tensor;
using c10::Scalar;
using Maybe = std::optional<Tensor>;

namespace stub {
static Tensor of(const Tensor &like, at::IntArrayRef sizes) { return at::empty(sizes, like.options()); }
static Tensor mm(const Tensor &a, const Tensor &b) { return of(a, {a.size(0), b.size(1)}); }
static Tensor bmm(const Tensor &a, const Tensor &b) { return of(a, {a.size(0), a.size(1), b.size(2)}); }
static Tensor addmm(const Tensor &, const Tensor &a, const Tensor &b, const Scalar &, const Scalar &) { return stub::mm(a, b); }
static Tensor baddbmm(const Tensor &, const Tensor &a, const Tensor &b, const Scalar &, const Scalar &) { return stub::bmm(a, b); }
static Tensor &two_out(const Tensor &, const Tensor &, Tensor &out) { return out; }
static Tensor &three_out(const Tensor &, const Tensor &, const Tensor &, const Scalar &, const Scalar &, Tensor &out) { return out; }

static bool last(const Tensor &t) { return t.is_contiguous(at::MemoryFormat::ChannelsLast) && !t.is_contiguous(); }
static at::MemoryFormat layout(const Tensor &x, const Tensor &w) {
  return x.dim() == 4 && (last(x) || last(w)) ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous;
}
static Tensor convolution(const Tensor &x, const Tensor &w, const Maybe &, c10::SymIntArrayRef stride, c10::SymIntArrayRef padding,
                          c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding, c10::SymInt groups) {
  TORCH_CHECK(!transposed, "no stub for transposed convolutions");
  std::vector<int64_t> sizes{x.size(0), w.size(0)};
  for (int64_t k = 2; k < x.dim(); k++) {
    int64_t span = dilation[k - 2].expect_int() * (w.size(k) - 1) + 1;
    sizes.push_back((x.size(k) + 2 * padding[k - 2].expect_int() - span) / stride[k - 2].expect_int() + 1);
  }
  return at::empty(sizes, x.options(), layout(x, w));
}
static std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor &g, const Tensor &x, const Tensor &w, at::OptionalSymIntArrayRef, c10::SymIntArrayRef, c10::SymIntArrayRef,
    c10::SymIntArrayRef, bool, c10::SymIntArrayRef, c10::SymInt, std::array<bool, 3> mask) {
  return {mask[0] ? at::empty(x.sizes(), x.options(), layout(x, w)) : Tensor(), mask[1] ? at::empty(w.sizes(), w.options(), layout(x, w)) : Tensor(),
          mask[2] ? of(g, {w.size(0)}) : Tensor()};
}

static Tensor heads(const Tensor &q) { return of(q, {q.size(0), q.size(2), q.size(1), q.size(3)}).transpose(1, 2); }
static std::tuple<Tensor, Tensor> attention(const Tensor &q, const Tensor &, const Tensor &, double, bool, const Maybe &, std::optional<double>) {
  return {heads(q), at::empty({q.size(0), q.size(2), q.size(1)}, q.options().dtype(at::kFloat)).transpose(1, 2)};
}
static std::tuple<Tensor, Tensor, Tensor> attention_backward(const Tensor &, const Tensor &q, const Tensor &k, const Tensor &v, const Tensor &,
                                                             const Tensor &, double, bool, const Maybe &, std::optional<double>) {
  return {heads(q), heads(k), heads(v)};
}

}  // namespace stub

static std::optional<torch::Library> library;
extern "C" void install() {
  library.emplace(torch::Library::IMPL, "aten", std::make_optional(c10::DispatchKey::CPU), __FILE__, __LINE__);
  library->impl("mm", stub::mm), library->impl("mm.out", stub::two_out), library->impl("bmm", stub::bmm), library->impl("bmm.out", stub::two_out);
  library->impl("addmm", stub::addmm), library->impl("addmm.out", stub::three_out);
  library->impl("baddbmm", stub::baddbmm), library->impl("baddbmm.out", stub::three_out);
  library->impl("convolution", stub::convolution), library->impl("convolution_backward", stub::convolution_backward);
  library->impl("_scaled_dot_product_flash_attention_for_cpu", stub::attention);
  library->impl("_scaled_dot_product_flash_attention_for_cpu_backward", stub::attention_backward);
}
extern "C" void uninstall() { library.reset(); }

// Attention by the kernel that `configure` chose, behind the entrance that torch has for
// each. The fused one is the CPU's, with the results that a kernel of a GPU has beside the
// attention: an empty mask, offsets of sequences, a random state.

#pragma once

#include "kernels.h"

namespace emulated {

// The numbers are those of `torch.nn.attention.SDPBackend`.
inline int64_t attention_kernel(
    const Tensor& query, const Tensor& key, const Tensor& value,
    const Optional<Tensor>& mask, double dropout, bool, Optional<double>, bool) {
  // The CPU's kernel takes heads for contiguous, and reads past those that are not.
  const bool dense =
      query.stride(-1) == 1 && key.stride(-1) == 1 && value.stride(-1) == 1;
  const bool fusible =
      dense && dropout == 0 && query.dim() == 4 && !(mask && mask->requires_grad());
  if (!fusible || settings.attention == Attention::math) return 0;
  return settings.attention == Attention::flash ? 1 : 4;
}

inline std::tuple<
    Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor>
attention(
    const Tensor& query, const Tensor& key, const Tensor& value, const Optional<Tensor>& mask,
    double dropout, bool causal, bool, Optional<double> scale) {
  auto [out, sums] = at::_scaled_dot_product_flash_attention_for_cpu(
      query, key, value, dropout, causal, mask, scale);
  const auto number = at::empty({}, query.options().dtype(at::kLong)).zero_();
  return {out, sums, Tensor(), Tensor(), query.size(2), key.size(2), number, number.clone(),
          Tensor()};
}

inline std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(
    const Tensor& grad, const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& mask, std::array<bool, 4>, const Tensor& out, const Tensor& sums,
    const Tensor&, const Tensor&, c10::SymInt, c10::SymInt, double dropout, bool causal,
    const Tensor&, const Tensor&, Optional<double> scale) {
  const auto given = mask.defined() ? Optional<Tensor>(mask) : std::nullopt;
  auto [of_query, of_key, of_value] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      grad, query, key, value, out, sums, dropout, causal, given, scale);
  return {of_query, of_key, of_value, Tensor()};
}

}  // namespace emulated

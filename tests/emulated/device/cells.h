// Recurrent cells fused as on a GPU: one operator that saves its activated gates.
//
// torch has no kernel of the CPU for them, which calls no other either.

#pragma once

#include "operands.h"

namespace emulated {

using Three = std::tuple<Tensor, Tensor, Tensor>;

inline Tensor plus(const Tensor& gates, const std::optional<Tensor>& bias) {
  return bias && bias->defined() ? gates + *bias : gates;
}

inline Three lstm_cell(
    const Tensor& input, const Tensor& hidden, const Tensor& cx,
    const std::optional<Tensor>& input_bias, const std::optional<Tensor>& hidden_bias) {
  const auto gates = (plus(input, input_bias) + plus(hidden, hidden_bias)).chunk(4, 1);
  const auto in = gates[0].sigmoid(), forget = gates[1].sigmoid();
  const auto cell = gates[2].tanh(), out = gates[3].sigmoid();
  auto cy = forget * cx + in * cell;
  return {out * cy.tanh(), cy, at::cat({in, forget, cell, out}, 1)};
}

inline Three lstm_cell_backward(
    const std::optional<Tensor>& grad_hy, const std::optional<Tensor>& grad_cy,
    const Tensor& cx, const Tensor& cy, const Tensor& saved, bool has_bias) {
  const auto gates = saved.chunk(4, 1);
  const auto &in = gates[0], &forget = gates[1], &cell = gates[2], &out = gates[3];
  const auto tanh = cy.tanh();
  const auto grad = grad_hy && grad_hy->defined() ? *grad_hy : at::zeros_like(cy);
  const auto state = plus(grad * out * (1 - tanh * tanh), grad_cy);
  const auto all = at::cat(
      {state * cell * in * (1 - in), state * cx * forget * (1 - forget),
       state * in * (1 - cell * cell), grad * tanh * out * (1 - out)},
      1);
  return {all, state * forget, has_bias ? all.sum(0) : Tensor()};
}

inline std::tuple<Tensor, Tensor> gru_cell(
    const Tensor& input, const Tensor& hidden, const Tensor& hx,
    const std::optional<Tensor>& input_bias, const std::optional<Tensor>& hidden_bias) {
  const auto i = plus(input, input_bias).chunk(3, 1);
  const auto h = plus(hidden, hidden_bias).chunk(3, 1);
  const auto reset = (i[0] + h[0]).sigmoid(), update = (i[1] + h[1]).sigmoid();
  const auto fresh = (i[2] + reset * h[2]).tanh();
  return {fresh + update * (hx - fresh), at::cat({reset, update, fresh, hx, h[2]}, 1)};
}

inline std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(
    const Tensor& grad, const Tensor& saved, bool has_bias) {
  const auto parts = saved.chunk(5, 1);
  const auto &reset = parts[0], &update = parts[1], &fresh = parts[2];
  const auto &hx = parts[3], &hidden = parts[4];
  const auto d_update = grad * (hx - fresh) * (1 - update) * update;
  const auto d_fresh = grad * (1 - update) * (1 - fresh * fresh);
  const auto d_reset = d_fresh * hidden * (1 - reset) * reset;
  const auto d_input = at::cat({d_reset, d_update, d_fresh}, 1);
  const auto d_hidden = at::cat({d_reset, d_update, d_fresh * reset}, 1);
  return {d_input, d_hidden, grad * update, has_bias ? d_input.sum(0) : Tensor(),
          has_bias ? d_hidden.sum(0) : Tensor()};
}

}  // namespace emulated

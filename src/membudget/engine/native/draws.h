// Random operators: the state of torch's CPU generator is noted, and brought back.
//
// Other generators and devices are left to Python, whose `Source` reads a state through
// torch's functions, 10 to 20 µs each; a copy of the engine takes less than one.

#pragma once

#include <ATen/CPUGeneratorImpl.h>

#include <mutex>
#include <optional>

#include "record.h"

namespace membudget {

inline PyObject* operator_lock;
inline PyObject *acquire_name, *release_name;

// The state of torch's CPU generator.
struct State {
  at::mt19937 engine;
  std::optional<float> next_float;
  std::optional<double> next_double;
};

using StateBox = Box<State>;

inline std::pair<at::CPUGeneratorImpl*, std::unique_lock<std::mutex>> locked_generator() {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  return {
      at::check_generator<at::CPUGeneratorImpl>(generator),
      std::unique_lock<std::mutex>(generator.mutex())};
}

// note(), as `Source.note`.
inline Ref noted_state() {
  auto [generator, lock] = locked_generator();
  return StateBox::make(
      generator->engine(), generator->next_float_normal_sample(),
      generator->next_double_normal_sample());
}

// bring_back(state), as `Source.bring_back`.
inline void bring_back(PyObject* noted) {
  auto [generator, lock] = locked_generator();
  const State& state = StateBox::of(noted);
  generator->set_engine(state.engine);
  generator->set_next_float_normal_sample(state.next_float);
  generator->set_next_double_normal_sample(state.next_double);
}

// Whether an operator with these arguments draws from torch's CPU generator.
inline bool draws_on_cpu(const Operator& known, const c10::Stack& stack, size_t first) {
  bool is_on_cpu = true;
  for (size_t i = first; i < stack.size(); ++i) {
    is_on_cpu &= !stack[i].isGenerator();
    is_on_cpu &= !stack[i].isDevice() || stack[i].toDevice().is_cpu();
  }
  for_each_tensor(known, stack, first, [&](const at::Tensor& tensor, Place) {
    is_on_cpu &= tensor.is_cpu();
  });
  return is_on_cpu;
}

// Holds the lock that lets one random operator run at a time.
class DrawLock {
 public:
  explicit DrawLock(bool is_needed) : is_needed_(is_needed) {
    if (is_needed_) {
      call(operator_lock, acquire_name);
    }
  }
  ~DrawLock() {
    if (is_needed_) {
      ErrorAside error;
      Py_XDECREF(PyObject_CallMethodNoArgs(operator_lock, release_name));
    }
  }
  DrawLock(const DrawLock&) = delete;

 private:
  bool is_needed_;
};

// Rewinds the generator to the state before a draw, as `call_random`.
class Redraw {
 public:
  explicit Redraw(PyObject* drawn) : lock_(drawn != Py_None) {
    if (drawn != Py_None) {
      now_ = noted_state();
      bring_back(drawn);
    }
  }
  ~Redraw() {
    if (now_ != nullptr) {
      bring_back(now_);
    }
  }
  Redraw(const Redraw&) = delete;

 private:
  DrawLock lock_;
  Ref now_;
};

} // namespace membudget

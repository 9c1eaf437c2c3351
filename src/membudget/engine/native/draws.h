// Random operators: the state of torch's CPU generator is noted, and brought back.
//
// Python knows how to note a state; other generators and devices are left to it.

#pragma once

#include "record.h"

namespace membudget {

inline PyObject *begin_draw, *end_draw, *begin_redraw, *end_redraw;

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

// Holds the lock of random operators while one runs, and notes the state before it.
class Draw {
 public:
  explicit Draw(bool is_random) : is_random_(is_random) {
    if (is_random_) {
      noted_ = Ref::made(PyObject_CallNoArgs(begin_draw));
    }
  }
  ~Draw() {
    if (is_random_) {
      Py_XDECREF(PyObject_CallNoArgs(end_draw));
    }
  }
  Draw(const Draw&) = delete;

  // What `Operation.drawn` is.
  PyObject* noted() const { return is_random_ ? (PyObject*)noted_ : Py_None; }

 private:
  bool is_random_;
  Ref noted_;
};

// Rewinds the generator to the state before a draw, as `call_random`.
class Redraw {
 public:
  explicit Redraw(PyObject* drawn) : drawn_(drawn) {
    if (drawn_ != Py_None) {
      now_ = Ref::made(PyObject_CallOneArg(begin_redraw, drawn_));
    }
  }
  ~Redraw() {
    if (drawn_ != Py_None) {
      Py_XDECREF(PyObject_CallFunctionObjArgs(end_redraw, drawn_, (PyObject*)now_, nullptr));
    }
  }
  Redraw(const Redraw&) = delete;

 private:
  PyObject* drawn_;
  Ref now_;
};

} // namespace membudget

// The kernel that observed threads reach below autograd, modes and subclasses.
//
// It covers the Python kernel that `_torch_observing` registered for the same operator,
// and passes on to it every call that it does not record itself.

#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/library.h>

#include <map>
#include <memory>

#include "recorder.h"

namespace membudget {

constexpr auto observed_key = c10::DispatchKey::Fake;

// What the observers of one thread are doing.
enum class Doing { nothing, recording, python };

struct Thread {
  PyObject* recorder = nullptr;  // The only observer, if it is a recorder. Borrowed.
  Doing doing = Doing::nothing;
};

inline thread_local Thread this_thread;

class Doings {
 public:
  explicit Doings(Doing now) : before_(std::exchange(this_thread.doing, now)) {}
  ~Doings() { this_thread.doing = before_; }
  Doings(const Doings&) = delete;

 private:
  Doing before_;
};

class Kernel : public c10::OperatorKernel {
 public:
  explicit Kernel(c10::SafeKernelFunction covered) : covered_(std::move(covered)) {}

  void operator()(
      const c10::OperatorHandle& target, c10::DispatchKeySet keys, c10::Stack* stack) {
    const auto below =
        keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, observed_key);
    if (this_thread.doing == Doing::recording) {
      // A kernel has reset the dispatch state of its thread.
      c10::impl::ExcludeDispatchKeyGuard unobserved(observed_key);
      target.redispatchBoxed(below, stack);
    } else if (!recorded(target, below, stack)) {
      Doings guard(Doing::python);
      covered_.callBoxed(target, keys, stack);
    }
  }

 private:
  bool recorded(
      const c10::OperatorHandle& target, c10::DispatchKeySet below, c10::Stack* stack) {
    const auto excluded = c10::impl::tls_local_dispatch_key_set().excluded_;
    if (this_thread.recorder == nullptr || this_thread.doing != Doing::nothing ||
        known_.kind == Kind::other || excluded.has(c10::DispatchKey::Python) ||
        c10::impl::TorchDispatchModeTLS::stack_len() > 0) {
      return false;
    }
    WithGil gil;
    if (known_.kind == Kind::unknown) {
      look_up(known_, target.operator_name());
    }
    Doings guard(Doing::recording);
    c10::impl::ExcludeDispatchKeyGuard unobserved(observed_key);
    return observe(this_thread.recorder, known_, target, below, stack);
  }

  c10::SafeKernelFunction covered_;
  Operator known_;
};

// Covers the Python kernel of an operator, such as "aten::add.Tensor".
inline void cover(const std::string& name) {
  // Never unloaded: at exit, torch's dispatcher may be gone first.
  static auto& libraries = *new std::map<std::string, torch::Library>();
  auto dot = name.find('.');
  std::string overload = dot == std::string::npos ? "" : name.substr(dot + 1);
  auto target = c10::Dispatcher::singleton().findOp({name.substr(0, dot), overload});
  if (!target || !target->hasKernelForDispatchKey(observed_key)) {
    return;
  }
  std::string space = name.substr(0, name.find("::"));
  auto library = libraries.find(space);
  if (library == libraries.end()) {
    library = libraries
                  .try_emplace(
                      space, torch::Library::IMPL, space, std::nullopt, __FILE__, __LINE__)
                  .first;
  }
  auto covered = target->getComputedKernelForDispatchKey(observed_key);
  library->second.impl(
      name.c_str(),
      torch::dispatch(
          observed_key,
          torch::CppFunction::makeFromBoxedFunctor(
              std::make_unique<Kernel>(std::move(covered)))));
}

} // namespace membudget

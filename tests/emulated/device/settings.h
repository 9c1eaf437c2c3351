// What the device costs and refuses: set by `configure`, read by everything else.
//
// Durations are whole picoseconds, so that sums do not depend on their order and a
// schedule's virtual time repeats to the digit.

#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include <Python.h>
#include <c10/core/Device.h>
#include <c10/core/DispatchKey.h>

namespace emulated {

using Picoseconds = int64_t;

// Always: autograd makes a thread for each device once, at the first backward pass.
constexpr int device_count = 2;

constexpr auto device_type = c10::DeviceType::PrivateUse1;
constexpr auto device_key = c10::DispatchKey::PrivateUse1;

// eager: work runs as it is launched. lazy: when somebody waits for it. threads: on a
// thread for each stream, which sleeps for as long as the work costs.
enum class Mode { eager, lazy, threads };

// What serves attention: operators, the CPU's fused one, or one that accelerators have.
enum class Attention { math, flash, fused };

struct Settings {
  Mode mode = Mode::lazy;
  size_t limit_bytes = 0;  // Of each device; 0 means none.
  size_t allowed_bytes = 0;  // The same, of this process, as a share that it sets itself.
  int64_t fail_at = 0;  // Which allocation from now on raises; 0 means none.
  size_t segment_bytes = 2 << 20;  // What CUDA's allocator takes for small blocks.
  bool poison = true;
  Attention attention = Attention::math;
  double flops_per_s = 50e12;
  double bytes_per_s = 1e12;
  double link_bytes_per_s = 25e9;
  Picoseconds link_latency = 0;
  Picoseconds launch = 5'000'000;  // Of the host's time, for each launch.
  std::map<std::string, Picoseconds> kernels;  // By name; others have a roofline.
};

inline Settings settings;

inline Picoseconds picoseconds(double seconds) {
  return static_cast<Picoseconds>(seconds * 1e12 + 0.5);
}

// The GIL given up for as long as this thread waits: what it waits for may need it.
class WithoutGil {
 public:
  WithoutGil() {
    if (Py_IsInitialized() && PyGILState_Check()) state_ = PyEval_SaveThread();
  }
  ~WithoutGil() {
    if (state_) PyEval_RestoreThread(state_);
  }
  WithoutGil(const WithoutGil&) = delete;

 private:
  PyThreadState* state_ = nullptr;
};

inline std::mutex& mutex = *new std::mutex;
inline thread_local int lock_depth = 0;  // So that a wait can give it up altogether.

// One lock guards queues, memory and generators. Work runs under it, but never Python.
class Lock {
 public:
  Lock() {
    if (lock_depth++ || mutex.try_lock()) return;
    WithoutGil waiting;
    mutex.lock();
  }
  ~Lock() {
    if (!--lock_depth) mutex.unlock();
  }
  Lock(const Lock&) = delete;
};

// The lock given up, however often this thread holds it.
class Unlocked {
 public:
  Unlocked() : depth_(std::exchange(lock_depth, 0)) { mutex.unlock(); }
  ~Unlocked() {
    mutex.lock();
    lock_depth = depth_;
  }
  Unlocked(const Unlocked&) = delete;

 private:
  int depth_;
};

inline thread_local int current_device = 0;

inline int index_of(c10::Device device) {
  return device.has_index() ? device.index() : current_device;
}

}  // namespace emulated

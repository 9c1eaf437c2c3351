// The device's random streams: a seed and an offset, as a GPU's Philox generator has.
//
// An operator draws with the CPU's kernel from a generator of its own, seeded by Philox
// from both numbers when it is launched. So the order in which work runs later cannot
// change what it draws, and none of it touches the CPU's stream.

#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/PhiloxRNGEngine.h>
#include <c10/core/GeneratorImpl.h>

#include "settings.h"

namespace emulated {

class Random final : public c10::GeneratorImpl {
 public:
  explicit Random(c10::DeviceIndex index)
      : GeneratorImpl(c10::Device(device_type, index), c10::DispatchKeySet(device_key)) {}

  static c10::DeviceType device_type_of() { return device_type; }

  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }

  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(
        state.numel() == 16 && state.dtype() == at::kByte && state.device().is_cpu(),
        "a state of emu's generator is 16 bytes on the CPU");
    const auto* words = static_cast<const uint64_t*>(state.data());
    seed_ = words[0];
    offset_ = words[1];
  }

  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::detail::empty_cpu({16}, at::kByte);
    auto* words = static_cast<uint64_t*>(state.mutable_data_ptr());
    words[0] = seed_;
    words[1] = offset_;
    return state.getIntrusivePtr();
  }

  // A generator of the CPU for one operator.
  at::Generator next() {
    Lock lock;
    at::Philox4_32 philox(seed_, 0, offset_);
    offset_ += 4;
    const uint64_t low = philox();
    return at::detail::createCPUGenerator(low | static_cast<uint64_t>(philox()) << 32);
  }

 private:
  Random* clone_impl() const override {
    auto* copy = new Random(device().index());
    copy->seed_ = seed_;
    copy->offset_ = offset_;
    return copy;
  }

  uint64_t seed_ = c10::default_rng_seed_val;
  uint64_t offset_ = 0;
};

inline const at::Generator& default_generator(int index) {
  static auto& generators = *new std::map<int, at::Generator>;
  Lock lock;
  auto& generator = generators[index];
  if (!generator.defined())
    generator = at::make_generator<Random>(static_cast<c10::DeviceIndex>(index));
  return generator;
}

inline at::Generator next_of(const std::optional<at::Generator>& given, int device) {
  const auto generator = given && given->defined() ? *given : default_generator(device);
  TORCH_CHECK(
      generator.device().type() == device_type, "Expected a generator of emu, found one of ",
      generator.device());
  return static_cast<Random*>(generator.unsafeGetGeneratorImpl())->next();
}

}  // namespace emulated

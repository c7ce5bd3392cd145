// Claims about the dispatcher kernels: `kernel_claims NAME LIBRARY...`, where the libraries are the
// stand-in for the driver, and the recorder as workers load it.
//
// PyTorch dispatches operations on tensors of a CUDA device, which a CPU build of it has no device
// for. So these tensors lie on the host and name the device, and a guard of the test answers what
// PyTorch asks about it. The back end does what ProcessGroupNCCL does, as far as a caller sees it:
// a synchronous call returns no work and runs on the current stream; an asynchronous one runs on a
// stream of the back end, and its work's future is complete at once.

#include <ATen/core/Tensor.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <atomic>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "claim.h"

using namespace keepstep;

namespace {

constexpr int CURRENT = 1, OWN = 2;  // Streams.
std::atomic<int> pool_streams{0};

struct Guard final : public c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device exchangeDevice(c10::Device device) const override { return device; }
  c10::Device getDevice() const override { return {c10::kCUDA, 0}; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::UNSAFE, device, CURRENT);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    ++pool_streams;
    return c10::Stream(c10::Stream::UNSAFE, device, OWN);
  }
  c10::Stream exchangeStream(c10::Stream its) const override { return its; }
  void* getStreamNativeHandle(const c10::Stream its) const override {
    return stream(static_cast<int>(its.id()));
  }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex,
              const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

// The recorder's library, as Python uses it.
template <typename Function>
Function* exported(const char* name) {
  auto* const found = reinterpret_cast<Function*>(dlsym(RTLD_DEFAULT, name));
  HOLDS(found != nullptr);
  return found;
}

int calls_inside() { return exported<int()>("keepstep_calls_inside")(); }

class TestWork : public c10d::Work {
 public:
  TestWork()
      : future_(c10::make_intrusive<c10::ivalue::Future>(
            c10::ListType::create(c10::TensorType::get()),
            std::vector<c10::Device>{{c10::kCUDA, 0}})) {}
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  void complete() { future_->markCompleted(c10::IValue(c10::List<at::Tensor>())); }

 private:
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

class TestBackend : public c10d::Backend {
 public:
  explicit TestBackend(std::string name) : Backend(0, 2), name_(std::move(name)) {}
  const std::string getBackendName() const override { return name_; }

  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>&,
                                           const c10d::AllreduceOptions& options) override {
    seen_inside = calls_inside();
    if (raises) throw std::runtime_error("the back end is broken");
    if (nccl != nullptr) nccl->collective(stream(options.asyncOp ? OWN : CURRENT));
    if (name_ == "nccl" && !options.asyncOp) return nullptr;
    last = c10::make_intrusive<TestWork>();
    if (name_ == "nccl") last->complete();
    return last;
  }

  Nccl* nccl = nullptr;
  bool raises = false;
  int seen_inside = 0;
  c10::intrusive_ptr<TestWork> last;

 private:
  std::string name_;
};

void set_coalescing(bool is_coalescing) {
  exported<void(int)>("keepstep_set_coalescing")(is_coalescing);
}

Profiler& plugin() { return *exported<Profiler>("ncclProfiler_v5"); }

// A process group with one back end for CUDA, recorded into a lane.
class RecordedGroup : public LaneFile {
 public:
  explicit RecordedGroup(const std::string& name = "nccl")
      : backend(c10::make_intrusive<TestBackend>(name)),
        group_(c10::make_intrusive<c10d::ProcessGroup>(0, 2)) {
    group_->setBackend(c10::kCUDA, c10d::ProcessGroup::strToBackendType(name),
                       c10::intrusive_ptr<c10d::Backend>(backend));
    group_->setGroupName("test");
    using Open = int(const char*, size_t, size_t, size_t, size_t, size_t, void*);
    HOLDS(exported<Open>("keepstep_open")(path, layout.nbytes, layout.offset, layout.capacity,
                                          layout.counter_offset, layout.step_offset,
                                          nullptr) == 0);
  }

  c10::intrusive_ptr<c10d::Work> all_reduce(bool is_asynchronous = false) {
    static float values[4];
    at::Storage storage(at::Storage::use_byte_size_t(), sizeof(values),
                        at::DataPtr(values, {c10::kCUDA, 0}), nullptr, false);
    at::Tensor tensor = at::detail::make_tensor<at::TensorImpl>(
        std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CUDA),
        caffe2::TypeMeta::Make<float>());
    tensor.unsafeGetTensorImpl()->set_sizes_contiguous({4});
    std::vector<at::Tensor> tensors{tensor};
    c10d::AllreduceOptions options;
    options.asyncOp = is_asynchronous;
    return group_->allreduce(tensors, options);
  }

  const c10::intrusive_ptr<TestBackend> backend;

 private:
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
};

bool is_unseen(const RecordedGroup& group, uint64_t position) {
  return (group.flags(position) & UNOBSERVED) && group.ended_s(position) == 0.0;
}

CLAIM(synchronous_operation_is_open_until_the_kernel_that_nccl_reports_has_ended) {
  use(0);
  Nccl nccl(plugin());
  RecordedGroup group;
  group.backend->nccl = &nccl;
  HOLDS(!group.all_reduce().defined());
  HOLDS(group.read(0, &Record::nbytes) == 16);
  HOLDS(group.flags(0) == (DEVICE_TIMES | LAUNCHED));
  HOLDS(pending(stream(CURRENT)) == 2);
  HOLDS(group.started_s(0) == 0.0 && group.ended_s(0) == 0.0);
  complete(stream(CURRENT), 1, 1.0);
  WAIT_UNTIL(group.started_s(0) > 0.0);
  HOLDS(group.ended_s(0) == 0.0);
  complete(stream(CURRENT), 1, 2.0);
  WAIT_UNTIL(group.ended_s(0) > 0.0);
}

CLAIM(asynchronous_operation_is_observed_without_its_future) {
  use(0);
  Nccl nccl(plugin());
  RecordedGroup group;
  group.backend->nccl = &nccl;
  const auto work = group.all_reduce(true);
  HOLDS(work == group.backend->last);
  HOLDS(group.flags(0) == (DEVICE_TIMES | LAUNCHED | ASYNCHRONOUS));
  HOLDS(pending(stream(OWN)) == 2);
  HOLDS(group.ended_s(0) == 0.0);
  complete(stream(OWN), 2, 1.0);
  WAIT_UNTIL(group.ended_s(0) > 0.0);
  HOLDS(pool_streams == 0);
}

CLAIM(synchronous_operation_is_observed_by_events_around_it_where_nccl_reports_nothing) {
  use(0);
  RecordedGroup group;
  group.all_reduce();
  HOLDS(pending(stream(CURRENT)) == 2);
  HOLDS(group.started_s(0) == 0.0 && group.ended_s(0) == 0.0);
  complete(stream(CURRENT), 2, 1.0);
  WAIT_UNTIL(group.ended_s(0) > 0.0);
  HOLDS(group.flags(0) == (DEVICE_TIMES | LAUNCHED));
}

CLAIM(asynchronous_operation_is_not_observed_where_nccl_reports_nothing) {
  use(0);
  RecordedGroup group;
  const auto work = group.all_reduce(true);
  HOLDS(work == group.backend->last);
  HOLDS(is_unseen(group, 0));
  HOLDS(pending(stream(CURRENT)) + pending(stream(OWN)) == 0);
  HOLDS(pool_streams == 0);
}

CLAIM(coalesced_operation_is_not_observed_where_nccl_reports_nothing) {
  use(0);
  RecordedGroup group;
  set_coalescing(true);
  group.all_reduce();
  set_coalescing(false);
  HOLDS(is_unseen(group, 0));
  HOLDS(pending(stream(CURRENT)) == 0);
  group.all_reduce();
  HOLDS(pending(stream(CURRENT)) == 2);
}

CLAIM(communicator_whose_launches_are_not_reported_is_observed_by_events) {
  use(0);
  // NCCL reports other communicators; this one has one rank, say.
  Nccl other(plugin());
  RecordedGroup group;
  group.all_reduce();
  HOLDS(is_unseen(group, 0));
  HOLDS(pending(stream(CURRENT)) == 0);
  group.all_reduce();
  HOLDS(pending(stream(CURRENT)) == 2);
  complete(stream(CURRENT), 2, 1.0);
  WAIT_UNTIL(group.ended_s(1) > 0.0);
  // Once a launch is reported, no more events are recorded around calls.
  group.backend->nccl = &other;
  group.all_reduce();
  complete(stream(CURRENT), 3, 2.0);
  WAIT_UNTIL(group.ended_s(2) > 0.0);
  group.all_reduce();
  HOLDS(pending(stream(CURRENT)) == 2);
}

CLAIM(captured_call_is_not_observed) {
  use(0);
  RecordedGroup group;
  STAND_IN(stand_in_begin_capture)(stream(CURRENT));
  group.all_reduce();
  HOLDS(STAND_IN(stand_in_end_capture)());
  HOLDS(is_unseen(group, 0));
  check_nothing_forbidden();
}

CLAIM(call_that_raises_is_recorded_as_failed) {
  use(0);
  RecordedGroup group;
  group.backend->raises = true;
  bool has_raised = false;
  try {
    group.all_reduce();
  } catch (const std::exception&) {
    has_raised = true;
  }
  HOLDS(has_raised);
  HOLDS(group.flags(0) & FAILED);
  HOLDS(group.ended_s(0) > 0.0);
  group.backend->raises = false;
  group.all_reduce();
  HOLDS(pending(stream(CURRENT)) >= 2);
}

CLAIM(threads_inside_a_call_are_counted_until_it_returns_or_raises) {
  use(0);
  RecordedGroup group;
  HOLDS(calls_inside() == 0);
  group.all_reduce();
  HOLDS(group.backend->seen_inside == 1);
  HOLDS(calls_inside() == 0);
  group.backend->raises = true;
  try {
    group.all_reduce();
  } catch (const std::exception&) {
  }
  HOLDS(calls_inside() == 0);
}

CLAIM(operation_that_the_host_carries_out_ends_with_its_future) {
  use(0);
  RecordedGroup group("gloo");
  const auto work = group.all_reduce(true);
  HOLDS(group.flags(0) == ASYNCHRONOUS);
  HOLDS(group.started_s(0) == group.read(0, &Record::enqueued_s));
  HOLDS(group.ended_s(0) == 0.0);
  group.backend->last->complete();
  HOLDS(group.ended_s(0) > 0.0);
  HOLDS(pool_streams == 0);
  HOLDS(pending(stream(CURRENT)) == 0);
}

}  // namespace

int main(int count, char** arguments) { return run_claim(count, arguments); }

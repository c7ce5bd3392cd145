// Wraps a work without a future (gloo's sends and receives); records its end when it is waited for.
//
// Never one of NCCL's: functional collectives find those by their address.

#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <utility>
#include <vector>

#include "lane.h"

namespace keepstep {

class WatchedWork : public c10d::Work {
 public:
  WatchedWork(c10::intrusive_ptr<c10d::Work> inner, Ticket ticket)
      : inner_(std::move(inner)), ticket_(std::move(ticket)) {}
  ~WatchedWork() override { record_end(UNOBSERVED); }
  bool isCompleted() override {
    const bool is_completed = inner_->isCompleted();
    if (is_completed) record_end(0);
    return is_completed;
  }
  bool isSuccess() const override { return inner_->isSuccess(); }
  std::exception_ptr exception() const override { return inner_->exception(); }
  int sourceRank() const override { return inner_->sourceRank(); }
  std::vector<at::Tensor> result() override { return inner_->result(); }
  void synchronize() override { inner_->synchronize(); }
  bool wait(std::chrono::milliseconds timeout) override {
    try {
      const bool is_completed = inner_->wait(timeout);
      // gloo's wait returns false if it was aborted.
      record_end(is_completed ? 0 : FAILED);
      return is_completed;
    } catch (...) {
      record_end(FAILED);
      throw;
    }
  }
  void abort() override { inner_->abort(); }
  float getDuration() const override { return inner_->getDuration(); }
  uint64_t getSequencenumber() const override { return inner_->getSequencenumber(); }

 private:
  void record_end(uint8_t flags) {
    if (!is_end_recorded_.exchange(true)) ticket_.end(flags);
  }
  c10::intrusive_ptr<c10d::Work> inner_;
  Ticket ticket_;
  std::atomic<bool> is_end_recorded_{false};
};

}  // namespace keepstep

// A few threads that compute one step together, made for phases of microseconds on a machine that others use too.
//
// Whoever is free takes the next chunk of a phase, so a helper that was taken off its core (by the event loop, say) holds
// up nobody unless it was within a chunk. OpenMP's static shares and its barriers wait for every thread every time, which
// cost a token two to three times its arithmetic on two cores. Helpers spin while a step runs and sleep between steps.

#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace slipstream {

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

class Team {
 public:
  explicit Team(int64_t threads) {
    try {
      for (int64_t worker = 1; worker < threads; ++worker) helpers_.emplace_back([this, worker] { help(worker); });
    } catch (...) {
      // Too many threads: those that run must be joined, or they end the process.
      stop();
      throw;
    }
  }

  ~Team() { stop(); }

  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int64_t size() const { return static_cast<int64_t>(helpers_.size()) + 1; }

  // Calls work(chunk, worker) once for each chunk in [0, chunks), and returns when all are done. One caller at a time.
  template <typename Work>
  void run(int64_t chunks, const Work& work) {
    if (chunks <= 1 || helpers_.empty()) {
      for (int64_t chunk = 0; chunk < chunks; ++chunk) work(chunk, 0);
      return;
    }
    const uint32_t phase = ++phase_;
    Job& job = jobs_[phase & 1];
    job.call = [](const void* of, int64_t chunk, int64_t worker) { (*static_cast<const Work*>(of))(chunk, worker); };
    job.work = &work;
    job.chunks.store(static_cast<uint32_t>(chunks), std::memory_order_relaxed);
    done_.store(0, std::memory_order_relaxed);
    resting_.store(false, std::memory_order_relaxed);
    ticket_.store(static_cast<uint64_t>(phase) << 32);
    if (asleep_.load() > 0) {
      std::lock_guard guard(mutex_);
      woken_.notify_all();
    }
    take(phase, 0);
    while (done_.load(std::memory_order_acquire) < chunks) relax();
  }

  // The step is over: helpers need not spin for the next phase.
  void rest() { resting_.store(true, std::memory_order_relaxed); }

 private:
  static constexpr int kSpins = 2000;

  void stop() {
    {
      std::lock_guard guard(mutex_);
      stopping_.store(true);
    }
    woken_.notify_all();
    for (std::thread& helper : helpers_) helper.join();
  }

  struct Job {
    void (*call)(const void*, int64_t, int64_t) = nullptr;
    const void* work = nullptr;
    // A late helper may look at it while it is overwritten; what it sees then leads to no exchange.
    std::atomic<uint32_t> chunks{0};
  };

  // A ticket is the phase and its next chunk. Two jobs take turns: one is overwritten only after the phase behind it was
  // announced, and from then on no exchange on its own phase can succeed, however late a helper comes.
  void take(uint32_t phase, int64_t worker) {
    const Job& job = jobs_[phase & 1];
    uint64_t ticket = ticket_.load();
    while (ticket >> 32 == phase && static_cast<uint32_t>(ticket) < job.chunks.load(std::memory_order_relaxed)) {
      if (!ticket_.compare_exchange_weak(ticket, ticket + 1)) continue;
      job.call(job.work, static_cast<uint32_t>(ticket), worker);
      done_.fetch_add(1, std::memory_order_release);
      ticket = ticket_.load();
    }
  }

  void help(int64_t worker) {
    uint32_t seen = 0;
    const auto news = [&] { return static_cast<uint32_t>(ticket_.load() >> 32) != seen || stopping_.load(); };
    for (;;) {
      for (int spin = 0; spin < kSpins && !news() && !resting_.load(std::memory_order_relaxed); ++spin) relax();
      if (!news()) {
        std::unique_lock lock(mutex_);
        asleep_.fetch_add(1);
        woken_.wait(lock, news);
        asleep_.fetch_sub(1);
      }
      if (stopping_.load()) return;
      seen = static_cast<uint32_t>(ticket_.load() >> 32);
      take(seen, worker);
    }
  }

  Job jobs_[2];
  uint32_t phase_ = 0;
  alignas(64) std::atomic<uint64_t> ticket_{0};
  alignas(64) std::atomic<int64_t> done_{0};
  alignas(64) std::atomic<bool> resting_{true};
  std::atomic<bool> stopping_{false};
  std::atomic<int> asleep_{0};
  std::mutex mutex_;
  std::condition_variable woken_;
  std::vector<std::thread> helpers_;
};

}  // namespace slipstream

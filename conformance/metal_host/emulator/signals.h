// Ending a launch early: crashes and endless loops in kernel text become findings instead of ending the process.
#pragma once
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#include "state.h"

namespace tq {
namespace {

pid_t launch_thread;
const int fatal_signals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
struct sigaction old_actions[4], old_timer_action;

// A signal of its own, so that no other alarm of the process looks like a hang.
inline int timer_signal() { return SIGRTMIN + 7; }

inline uint64_t signal_pc(void* context) {
#if defined(__x86_64__)
  return static_cast<uint64_t>(static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_RIP]);
#elif defined(__aarch64__)
  return static_cast<ucontext_t*>(context)->uc_mcontext.pc;
#else
  (void)context;
  return 0;
#endif
}

inline void on_signal(int number, siginfo_t*, void* context) {
  if (static_cast<pid_t>(syscall(SYS_gettid)) != launch_thread) {
    if (number == timer_signal()) return;
    for (int i = 0; i < 4; ++i)
      if (fatal_signals[i] == number) sigaction(number, &old_actions[i], nullptr);
    return;  // the fault repeats under the handler it belongs to
  }
  uint64_t pc = signal_pc(context);
  if (!g.current) g.current = g.last;
  if (!relative(pc) && g.current) pc = g.current->pc;
  record(number == timer_signal() ? TQ_HANG : TQ_CRASH, TQ_NO_REGION, number, 0, pc);
  abandon();
}

struct Guard {
  timer_t timer;
  stack_t old_stack;
  bool armed = false;

  explicit Guard(double seconds, void* handler_stack, size_t size) {
    launch_thread = static_cast<pid_t>(syscall(SYS_gettid));
    stack_t stack = {};
    stack.ss_sp = handler_stack;
    stack.ss_size = size;
    sigaltstack(&stack, &old_stack);
    struct sigaction action = {};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigemptyset(&action.sa_mask);
    for (int i = 0; i < 4; ++i) sigaction(fatal_signals[i], &action, &old_actions[i]);
    sigaction(timer_signal(), &action, &old_timer_action);
    // Processor time of this thread, so that a busy machine does not look like a hang.
    struct sigevent event = {};
    event.sigev_notify = SIGEV_THREAD_ID;
    event.sigev_signo = timer_signal();
#ifdef sigev_notify_thread_id
    event.sigev_notify_thread_id = launch_thread;
#else
    event._sigev_un._tid = launch_thread;
#endif
    if (timer_create(CLOCK_THREAD_CPUTIME_ID, &event, &timer) == 0) {
      armed = true;
      struct itimerspec when = {};
      when.it_value.tv_sec = static_cast<time_t>(seconds);
      when.it_value.tv_nsec = static_cast<long>((seconds - static_cast<double>(when.it_value.tv_sec)) * 1e9);
      timer_settime(timer, 0, &when, nullptr);
    }
  }

  ~Guard() {
    if (armed) timer_delete(timer);
    sigaction(timer_signal(), &old_timer_action, nullptr);
    for (int i = 0; i < 4; ++i) sigaction(fatal_signals[i], &old_actions[i], nullptr);
    sigaltstack(&old_stack, nullptr);
  }
};

}  // namespace
}  // namespace tq

// Switching between the stacks of the threads of one threadgroup, all on one operating-system thread.
#pragma once
#include <stdint.h>

#if !defined(TQ_UCONTEXT) && !defined(__x86_64__) && !defined(__aarch64__)
#define TQ_UCONTEXT 1
#endif

#ifdef TQ_UCONTEXT
#include <ucontext.h>

typedef ucontext_t tq_context;

static inline void tq_switch(tq_context* from, tq_context* to) { swapcontext(from, to); }

static inline void tq_make(tq_context* context, void* stack, uint64_t size, void (*body)()) {
  getcontext(context);
  context->uc_stack.ss_sp = stack;
  context->uc_stack.ss_size = size;
  context->uc_link = nullptr;
  makecontext(context, body, 0);
}

#else

// A suspended context is its stack pointer: the callee-saved registers lie on the stack itself. The floating-point
// control word is the same for all of them, so it is not part of the context.
typedef void* tq_context;

extern "C" void tq_switch_stack(void** from, void* to);

#if defined(__x86_64__)
#ifdef TQ_DEFINE_SWITCH
asm(R"(
.text
.hidden tq_switch_stack
.globl tq_switch_stack
.type tq_switch_stack, @function
tq_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size tq_switch_stack, . - tq_switch_stack
)");
#endif

static inline void tq_make(tq_context* context, void* stack, uint64_t size, void (*body)()) {
  uint64_t* top = reinterpret_cast<uint64_t*>((reinterpret_cast<uint64_t>(stack) + size) & ~15ull);
  *--top = 0;  // keeps the stack aligned as after a call
  *--top = reinterpret_cast<uint64_t>(body);
  for (int i = 0; i < 6; ++i) *--top = 0;
  *context = top;
}

#else  // __aarch64__
#ifdef TQ_DEFINE_SWITCH
asm(R"(
.text
.hidden tq_switch_stack
.globl tq_switch_stack
.type tq_switch_stack, %function
tq_switch_stack:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x2, sp
  str x2, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size tq_switch_stack, . - tq_switch_stack
)");
#endif

static inline void tq_make(tq_context* context, void* stack, uint64_t size, void (*body)()) {
  uint64_t* top = reinterpret_cast<uint64_t*>((reinterpret_cast<uint64_t>(stack) + size) & ~15ull);
  top -= 20;
  for (int i = 0; i < 20; ++i) top[i] = 0;
  top[11] = reinterpret_cast<uint64_t>(body);  // the slot of x30, where `ret` goes
  *context = top;
}
#endif

static inline void tq_switch(tq_context* from, tq_context* to) { tq_switch_stack(from, *to); }

#endif  // TQ_UCONTEXT

// Float32 subnormals count as zero on Apple's GPUs, as operands and as results.
static inline uint64_t tq_flush_subnormals() {
#if defined(__x86_64__)
  uint32_t old = __builtin_ia32_stmxcsr();
  __builtin_ia32_ldmxcsr((old & ~0x3Fu) | 0x8040u);
  return old;
#elif defined(__aarch64__)
  uint64_t old;
  asm volatile("mrs %0, fpcr" : "=r"(old));
  asm volatile("msr fpcr, %0" ::"r"(old | (1ull << 24)));
  return old;
#else
  return 0;
#endif
}

static inline void tq_restore_float_mode(uint64_t old) {
#if defined(__x86_64__)
  __builtin_ia32_ldmxcsr(static_cast<uint32_t>(old));
#elif defined(__aarch64__)
  asm volatile("msr fpcr, %0" ::"r"(old));
#else
  (void)old;
#endif
}

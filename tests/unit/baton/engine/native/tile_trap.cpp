// Lets programs with AMX's tile instructions run on a processor that has none: each of them traps
// (SIGILL), and the handler does what Intel's manual says. For tests; a product takes microseconds.
#include <immintrin.h>
#include <signal.h>
#include <ucontext.h>

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace {

struct Tiles {
  bool configured = false;
  uint8_t rows[8] = {};
  uint16_t row_bytes[8] = {};
  uint8_t data[8][16][64] = {};
};
thread_local Tiles tiles;
// By kind: ldtilecfg and sttilecfg, tilezero, tileloadd, tilestored, tdpbf16ps.
std::atomic<long> trapped[5];

// The general registers in the order of their numbers in instructions.
constexpr int kRegisters[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                              REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};

// An instruction with a three-byte VEX prefix in the opcode map 0F38.
struct Instruction {
  int prefix, opcode, mod, reg, rm, vvvv, length;
  uint8_t* base;    // of the operand in memory
  long index = 0;   // value of the index register, times its scale

  Instruction(const uint8_t* at, const greg_t* registers) : base(nullptr) {
    const int rex = ~at[1], modrm = at[4];
    prefix = at[2] & 3, opcode = at[3], vvvv = ~at[2] >> 3 & 15;
    mod = modrm >> 6, reg = modrm >> 3 & 7, rm = modrm & 7, length = 5;
    if (at[0] != 0xc4 || (at[1] & 31) != 2 || at[2] & 0x84) std::abort();
    if (mod == 3) return;
    int number = rm | (rex >> 2 & 8);
    if (rm == 4) {
      const int sib = at[length++], index_number = (sib >> 3 & 7) | (rex >> 3 & 8);
      number = (sib & 7) | (rex >> 2 & 8);
      if (index_number != 4) index = long(registers[kRegisters[index_number]]) << (sib >> 6);
    }
    if (mod == 0 && (number & 7) == 5) std::abort();  // relative to the instruction
    base = reinterpret_cast<uint8_t*>(registers[kRegisters[number]]);
    if (mod == 1) base += static_cast<int8_t>(at[length++]);
    if (mod == 2) {
      int32_t offset;
      std::memcpy(&offset, at + length, 4);
      base += offset, length += 4;
    }
  }
};

float part(uint32_t pair, int odd) {
  const uint32_t bits = odd ? pair & 0xffff0000 : pair << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

__attribute__((noinline)) void multiply(int sums, int rows, int columns) {
  for (int m = 0; m < tiles.rows[sums]; ++m) {
    float chains[2][16] = {}, sum[16];
    uint32_t row[16], column[16];
    std::memcpy(row, tiles.data[rows][m], 64);
    std::memcpy(sum, tiles.data[sums][m], 64);
    for (int k = 0; k < tiles.row_bytes[rows] / 4; ++k) {
      std::memcpy(column, tiles.data[columns][k], 64);
      for (int odd = 0; odd < 2; ++odd)
        for (int n = 0; n < tiles.row_bytes[sums] / 4; ++n)
          chains[odd][n] = std::fma(part(row[k], odd), part(column[n], odd), chains[odd][n]);
    }
    for (int n = 0; n < 16; ++n) sum[n] += chains[0][n] + chains[1][n];
    std::memcpy(tiles.data[sums][m], sum, 64);
  }
}

void store_configuration(uint8_t* to) {
  std::memset(to, 0, 64);
  to[0] = tiles.configured;
  std::memcpy(to + 16, tiles.row_bytes, sizeof tiles.row_bytes);
  std::memcpy(to + 48, tiles.rows, sizeof tiles.rows);
}

void configure(const uint8_t* from) {
  if (from[0] > 1 || from[1] != 0) std::abort();
  tiles = Tiles();
  tiles.configured = from[0];
  if (!tiles.configured) return;
  std::memcpy(tiles.row_bytes, from + 16, sizeof tiles.row_bytes);
  std::memcpy(tiles.rows, from + 48, sizeof tiles.rows);
}

void execute(int, siginfo_t*, void* context) {
  greg_t* registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
  const Instruction what(reinterpret_cast<const uint8_t*>(registers[REG_RIP]), registers);
  const int kind = what.opcode << 4 | what.prefix;
  if (what.opcode != 0x49 && !tiles.configured) std::abort();
  const auto each_row = [&](auto&& copy) {
    for (int row = 0; row < tiles.rows[what.reg]; ++row)
      copy(tiles.data[what.reg][row], what.base + row * what.index, tiles.row_bytes[what.reg]);
  };
  switch (kind) {
    case 0x490:
      ++trapped[0];
      configure(what.base);
      break;
    case 0x491:
      ++trapped[0];
      store_configuration(what.base);
      break;
    case 0x493:
      ++trapped[1];
      std::memset(tiles.data[what.reg], 0, sizeof tiles.data[what.reg]);
      break;
    case 0x4b3:
      ++trapped[2];
      each_row([](uint8_t* tile, uint8_t* memory, long size) { std::memcpy(tile, memory, size); });
      break;
    case 0x4b2:
      ++trapped[3];
      each_row([](uint8_t* tile, uint8_t* memory, long size) { std::memcpy(memory, tile, size); });
      break;
    case 0x5c2:
      ++trapped[4];
      _mm_setcsr(_mm_getcsr() | 0x8040);  // subnormal numbers are zero, until the handler returns
      multiply(what.reg, what.rm, what.vvvv);
      break;
    default:
      std::abort();
  }
  registers[REG_RIP] += what.length;
}

}  // namespace

extern "C" {

int tile_trap_install() {
  struct sigaction action = {};
  action.sa_sigaction = execute;
  action.sa_flags = SA_SIGINFO;
  return sigaction(SIGILL, &action, nullptr);
}

long tile_trap_count(int kind) { return trapped[kind]; }
}

// The C interface, called through ctypes: nothing here knows Python or torch. Errors come back as a message.
#include <exception>
#include <new>

#include "decoder.h"
#include "encoder.h"
#include "resample.h"

using namespace triptych;

namespace {
enum Products : int32_t { kFloats = 0, kPairs = 1, kTiles = 2 };  // of bfloat16: widened, by AVX512-BF16, by AMX
enum Kind : int32_t { kFloat32 = 0, kBfloat16 = 1, kNarrow = 2 };  // narrow: float32, weights kept in bfloat16
thread_local char message[256];

template <class Call>
const char* guarded(Call call) {
  try {
    call();
    return nullptr;
  } catch (const std::exception& error) {
    strncpy(message, error.what(), sizeof message - 1);
    return message;
  }
}

template <class Kernel>
void linear(const void* x, int rows, int k, const void* weight, const float* bias, int columns, int width, float* out,
            int threads) {
  using T = typename Kernel::Store;
  using Act = typename Kernel::Act;
  static thread_local Buffer<Act> buffer;
  Act* a = buffer.get(Kernel::act_count(rows, k));
  Team team(threads);
#pragma omp parallel num_threads(threads)
  {
    const int member = omp_get_thread_num();
    const Range mine = team.share(rows, member);
    for (int row = mine.lo; row < mine.hi; row++)
      for (int i = 0; i < k; i += 16) store16(Kernel::act(a, k, row, i), load16((const T*)x + (size_t)row * k + i));
    team.barrier();
    const Range groups = team.share(width / kGroup, member);
    Kernel::begin(rows);
    Kernel::gemm(a, rows, k, (const typename Kernel::Weight*)weight, groups.lo, groups.hi, [&](int row, int count, int col, const float* c) {
      const int lanes = std::min(kGroup, columns - col);
      for (int r = 0; r < count; r++)
        for (int i = 0; i < lanes; i++)
          out[(size_t)(row + r) * columns + col + i] = c[r * kGroup + i] + (bias ? bias[col + i] : 0.0f);
    });
    Kernel::end();
  }
}
}  // namespace

extern "C" {

// The fastest that this CPU has for bfloat16.
int32_t triptych_products() {
#ifdef __AMX_BF16__
  static const bool granted = Amx::request_permission();
  if (granted) return kTiles;
#endif
#ifdef __AVX512BF16__
  return kPairs;
#else
  return kFloats;
#endif
}

DecoderBase* triptych_decoder_new(const DecoderShape* shape, int32_t kind, int32_t products) {
  try {
    if (kind == kFloat32) return new Decoder<Portable<float>>(*shape);
    if (kind == kNarrow) return new Decoder<Portable<bf16, float>>(*shape);
#ifdef __AMX_BF16__
    if (products == kTiles) return new Decoder<Amx>(*shape);
#endif
#ifdef __AVX512BF16__
    if (products >= kPairs) return new Decoder<Pairs>(*shape);
#endif
    return new Decoder<Portable<bf16>>(*shape);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

void triptych_decoder_free(DecoderBase* decoder) { delete decoder; }

const char* triptych_decoder_step(DecoderBase* decoder, const StepInput* in) {
  return guarded([&] { decoder->step(*in); });
}

// out[rows][columns] = x[rows][k] W^T + bias; `width`: columns as packed, a multiple of 32.
const char* triptych_linear(const void* x, int32_t rows, int32_t k, const void* weight, const float* bias,
                            int32_t columns, int32_t width, float* out, int32_t kind, int32_t products,
                            int32_t threads) {
  return guarded([&] {
    if (kind == kFloat32) return linear<Portable<float>>(x, rows, k, weight, bias, columns, width, out, threads);
    if (kind == kNarrow) return linear<Portable<bf16, float>>(x, rows, k, weight, bias, columns, width, out, threads);
#ifdef __AMX_BF16__
    if (products == kTiles) return linear<Amx>(x, rows, k, weight, bias, columns, width, out, threads);
#endif
#ifdef __AVX512BF16__
    if (products >= kPairs) return linear<Pairs>(x, rows, k, weight, bias, columns, width, out, threads);
#endif
    linear<Portable<bf16>>(x, rows, k, weight, bias, columns, width, out, threads);
  });
}

// Pictures [height][width][3] uint8, resampled as Pillow does it, the horizontal pass first.
const char* triptych_resample(const void* in, int32_t height, int32_t width, void* out, int32_t out_height,
                              int32_t out_width, int32_t filter) {
  return guarded([&] {
    resample::resize(static_cast<const uint8_t*>(in), height, width, static_cast<uint8_t*>(out), out_height, out_width,
                     filter);
  });
}

// `products`: those that the weights are packed for. A decoder's are packed alike for all.
EncoderBase* triptych_encoder_new(const EncoderShape* shape, int32_t kind, int32_t products) {
  try {
    if (kind == kFloat32) return new Encoder<Panels<float>>(*shape);
#ifdef __AMX_BF16__
    if (products == kTiles) return new Encoder<Tiles>(*shape);
#endif
#ifdef __AVX512BF16__
    if (products == kPairs) return new Encoder<Panels<bf16, bf16x2>>(*shape);
#endif
    return new Encoder<Panels<bf16>>(*shape);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

void triptych_encoder_free(EncoderBase* encoder) { delete encoder; }

const char* triptych_encoder_layer(EncoderBase* encoder, const EncoderWeights* weights, const void* x, void* out,
                                   int32_t pictures, int32_t tokens, int32_t threads) {
  return guarded([&] { encoder->layer(*weights, x, out, pictures, tokens, threads); });
}
}

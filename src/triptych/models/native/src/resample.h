#pragma once
// Pillow's 8-bit resampling, bit for bit, laid out for vector units. Plain C interface, no dependencies.
//
// Two passes, the horizontal one first: each output value is a fixed-point sum of input values (22 bits), rounded to
// 8 bits between the passes. Rows are summed whole, so a pass along a row runs on the transposed picture.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <vector>

namespace resample {

constexpr int kPrecision = 32 - 8 - 2;
constexpr int kChannels = 3;
constexpr int kBlock = 64;  // row bytes summed at once
constexpr int kTile = 16;   // side of a transposed tile

inline double sinc(double x) {
    if (x == 0.0) return 1.0;
    x *= M_PI;
    return std::sin(x) / x;
}

inline double lanczos(double x) { return -3.0 <= x && x < 3.0 ? sinc(x) * sinc(x / 3) : 0.0; }

inline double bilinear(double x) {
    x = std::fabs(x);
    return x < 1.0 ? 1.0 - x : 0.0;
}

inline double bicubic(double x) {
    constexpr double a = -0.5;
    x = std::fabs(x);
    if (x < 1.0) return ((a + 2.0) * x - (a + 3.0)) * x * x + 1;
    if (x < 2.0) return (((x - 5) * x + 8) * x - 4) * a;
    return 0.0;
}

struct Filter {
    double (*weight)(double);
    double support;
};

// The codes of PIL.Image.Resampling.
inline bool find_filter(int code, Filter* filter) {
    switch (code) {
        case 1: *filter = {lanczos, 3.0}; return true;
        case 2: *filter = {bilinear, 1.0}; return true;
        case 3: *filter = {bicubic, 2.0}; return true;
        default: return false;
    }
}

struct Taps {
    int width;                  // weights an output has at most
    std::vector<int> first;     // [out] first input
    std::vector<int> count;     // [out] inputs
    std::vector<int32_t> weight;  // [out, width] fixed point
};

inline Taps make_taps(int in, int out, const Filter& filter) {
    const double scale = static_cast<double>(in) / out;
    const double filter_scale = std::max(scale, 1.0);
    const double support = filter.support * filter_scale;
    const int width = static_cast<int>(std::ceil(support)) * 2 + 1;
    Taps taps{width, std::vector<int>(out), std::vector<int>(out), std::vector<int32_t>(size_t(out) * width)};
    std::vector<double> exact(width);
    for (int x = 0; x < out; ++x) {
        const double center = (x + 0.5) * scale;
        const double step = 1.0 / filter_scale;
        const int low = std::max(static_cast<int>(center - support + 0.5), 0);
        const int high = std::min(static_cast<int>(center + support + 0.5), in);
        double sum = 0.0;
        for (int i = 0; i < high - low; ++i) {
            exact[i] = filter.weight((i + low - center + 0.5) * step);
            sum += exact[i];
        }
        for (int i = 0; i < high - low; ++i) {
            const double value = sum != 0.0 ? exact[i] / sum : exact[i];
            const double fixed = value * (1 << kPrecision);
            taps.weight[size_t(x) * width + i] = static_cast<int32_t>(value < 0 ? -0.5 + fixed : 0.5 + fixed);
        }
        taps.first[x] = low;
        taps.count[x] = high - low;
    }
    return taps;
}

// out[r, :] = weighted sum of the rows of `in` that r's taps name; rows of `row_bytes`.
inline void sum_rows(const uint8_t* in, uint8_t* out, int out_rows, size_t row_bytes, const Taps& taps) {
    for (int r = 0; r < out_rows; ++r) {
        const int32_t* weight = &taps.weight[size_t(r) * taps.width];
        const uint8_t* first = in + taps.first[r] * row_bytes;
        uint8_t* target = out + r * row_bytes;
        for (size_t at = 0; at < row_bytes; at += kBlock) {
            const int size = static_cast<int>(std::min<size_t>(kBlock, row_bytes - at));
            int32_t sum[kBlock];
            for (int i = 0; i < kBlock; ++i) sum[i] = 1 << (kPrecision - 1);
            for (int t = 0; t < taps.count[r]; ++t) {
                const uint8_t* row = first + t * row_bytes + at;
                const int32_t w = weight[t];
                if (size == kBlock) {
                    for (int i = 0; i < kBlock; ++i) sum[i] += w * row[i];
                } else {
                    for (int i = 0; i < size; ++i) sum[i] += w * row[i];
                }
            }
            for (int i = 0; i < size; ++i) {
                target[at + i] = static_cast<uint8_t>(std::clamp(sum[i] >> kPrecision, 0, 255));
            }
        }
    }
}

// [rows, columns] pixels -> [columns, rows].
inline void transpose(const uint8_t* in, uint8_t* out, int rows, int columns) {
    for (int r0 = 0; r0 < rows; r0 += kTile) {
        for (int c0 = 0; c0 < columns; c0 += kTile) {
            const int r1 = std::min(r0 + kTile, rows), c1 = std::min(c0 + kTile, columns);
            for (int c = c0; c < c1; ++c) {
                for (int r = r0; r < r1; ++r) {
                    const uint8_t* from = in + (size_t(r) * columns + c) * kChannels;
                    uint8_t* to = out + (size_t(c) * rows + r) * kChannels;
                    to[0] = from[0];
                    to[1] = from[1];
                    to[2] = from[2];
                }
            }
        }
    }
}

}  // namespace resample

namespace resample {

// in [height, width, 3] -> out [out_height, out_width, 3]; `filter_code` as PIL.Image.Resampling.
inline void resize(const uint8_t* in, int height, int width, uint8_t* out, int out_height, int out_width,
                   int filter_code) {
    Filter filter;
    if (!find_filter(filter_code, &filter)) throw std::invalid_argument("this resampling filter is not known");
    std::vector<uint8_t> across;
    const uint8_t* source = in;
    if (out_width != width) {
        std::vector<uint8_t> turned(size_t(height) * width * kChannels);
        std::vector<uint8_t> summed(size_t(height) * out_width * kChannels);
        transpose(in, turned.data(), height, width);
        sum_rows(turned.data(), summed.data(), out_width, size_t(height) * kChannels,
                 make_taps(width, out_width, filter));
        across.resize(summed.size());
        transpose(summed.data(), across.data(), out_width, height);
        source = across.data();
    }
    const size_t row_bytes = size_t(out_width) * kChannels;
    if (out_height != height) {
        sum_rows(source, out, out_height, row_bytes, make_taps(height, out_height, filter));
    } else {
        std::memcpy(out, source, row_bytes * height);
    }
}

}  // namespace resample

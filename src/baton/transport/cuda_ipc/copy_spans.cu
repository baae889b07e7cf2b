// Copies many spans by one launch: block (row, part) copies every gridDim.y-th part of one row.
// copy_spans.ptx is made from this file; its head says how.

template <typename T>
__device__ void copy_row(char *target, const char *source, long long num_bytes)
{
    constexpr int unrolled = 4;
    const T *from = reinterpret_cast<const T *>(source);
    T *to = reinterpret_cast<T *>(target);
    const long long count = num_bytes / sizeof(T);
    const long long step = (long long)blockDim.x * unrolled;
    for (long long first = blockIdx.y * step; first < count; first += gridDim.y * step) {
        T values[unrolled];
#pragma unroll
        for (int index = 0; index < unrolled; index++) {
            const long long at = first + index * blockDim.x + threadIdx.x;
            if (at < count) values[index] = from[at];
        }
#pragma unroll
        for (int index = 0; index < unrolled; index++) {
            const long long at = first + index * blockDim.x + threadIdx.x;
            if (at < count) to[at] = values[index];
        }
    }
}

// The table has one column for each row: its source, target and length, `stride` numbers apart.
extern "C" __global__ void copy_spans(const long long *table, long long stride, char *target, const char *source)
{
    const char *from = source + table[blockIdx.x];
    char *to = target + table[stride + blockIdx.x];
    const long long num_bytes = table[2 * stride + blockIdx.x];
    const unsigned long long bits = (unsigned long long)from | (unsigned long long)to | num_bytes;
    if (bits % 16 == 0)
        copy_row<uint4>(to, from, num_bytes);
    else if (bits % 4 == 0)
        copy_row<unsigned int>(to, from, num_bytes);
    else
        copy_row<char>(to, from, num_bytes);
}

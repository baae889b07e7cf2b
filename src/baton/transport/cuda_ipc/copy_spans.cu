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

// A row of the table is source, target, length and nothing: 32 bytes, which a block reads from the host at once.
extern "C" __global__ void copy_spans(const long long *table, char *target, const char *source)
{
    __shared__ long long row[4];
    if (threadIdx.x < 4) row[threadIdx.x] = table[4ll * blockIdx.x + threadIdx.x];
    __syncthreads();
    const char *from = source + row[0];
    char *to = target + row[1];
    const long long num_bytes = row[2];
    const unsigned long long bits = (unsigned long long)from | (unsigned long long)to | num_bytes;
    if (bits % 16 == 0)
        copy_row<uint4>(to, from, num_bytes);
    else if (bits % 4 == 0)
        copy_row<unsigned int>(to, from, num_bytes);
    else
        copy_row<char>(to, from, num_bytes);
}

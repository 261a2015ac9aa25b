/* Many threads that allocate and free in many ways.
 *   hammer greedy THREADS UNIT      every thread takes units until it is refused; then waits for a line on stdin
 *   hammer churn THREADS ROUNDS SEED  takes and frees at random, frees all at the end
 *   hammer launch COUNT             launches kernels, then waits until they are done
 *   hammer fork THREADS UNIT        as greedy, but in children made by fork and by a bare clone; then frees nothing
 *   hammer launchers THREADS COUNT  each thread launches kernels and waits for them now and then
 *   hammer volley THREADS COUNT     so many children attach and launch from all threads at once; each is ended after 5 ms
 *   hammer exec UNIT                takes one unit, becomes another program (exec), and is greedy there
 *   hammer context HOW UNIT         makes a context (HOW 0 the primary one, 1 its own), then is greedy; refused: prints "refused"
 *   hammer look 0                   asks how much memory there is, without a context
 *   hammer closed UNIT              closes every descriptor first, then takes units until it is refused
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

int cuMemAlloc_v2(uint64_t *pointer, size_t bytes);
int cuMemFree_v2(uint64_t pointer);
int cuMemAllocAsync(uint64_t *pointer, size_t bytes, void *stream);
int cuMemFreeAsync(uint64_t pointer, void *stream);
int cuMemCreate(uint64_t *handle, size_t bytes, const void *where, uint64_t flags);
int cuMemMap(uint64_t address, size_t bytes, size_t offset, uint64_t handle, uint64_t flags);
int cuMemUnmap(uint64_t address, size_t bytes);
int cuMemRelease(uint64_t handle);
int cuCtxSynchronize(void);
int cuCtxCreate_v2(void **context, unsigned flags, int device);
int cuDevicePrimaryCtxRetain(void **context, int device);
int cuDeviceTotalMem_v2(size_t *bytes, int device);
int nvmlDeviceGetMemoryInfo(void *device, void *info);
int cuLaunchKernel(void *f, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *s, void **p, void **e);

enum { HELD = 16 };
static size_t unit;
static unsigned rounds, first_seed;
static uint64_t taken;

static void *be_greedy(void *unused)
{
    uint64_t pointer;
    (void)unused;
    while (cuMemAlloc_v2(&pointer, unit) == 0)
        __atomic_add_fetch(&taken, unit, __ATOMIC_RELAXED);
    return NULL;
}

struct holding {
    uint64_t pointer, bytes;
    int kind; /* 0 nothing, 1 plain, 2 pooled, 3 mapped */
};

static void let_go(struct holding *held)
{
    int code = 0;
    if (held->kind == 1)
        code = cuMemFree_v2(held->pointer);
    else if (held->kind == 2)
        code = cuMemFreeAsync(held->pointer, NULL);
    else if (held->kind == 3)
        code = cuMemUnmap(held->pointer, held->bytes);
    if (code != 0)
        abort();
    held->kind = 0;
}

static void take(struct holding *held, unsigned *seed)
{
    static const int where[32] = {1, 0, 1, 0};
    static uint64_t next_address = 0x600000000000;
    uint64_t handle;
    held->bytes = (1 + (uint64_t)rand_r(seed) % 64) << 20;
    switch (rand_r(seed) % 3) {
    case 0:
        held->kind = cuMemAlloc_v2(&held->pointer, held->bytes) == 0 ? 1 : 0;
        break;
    case 1:
        held->kind = cuMemAllocAsync(&held->pointer, held->bytes, NULL) == 0 ? 2 : 0;
        break;
    default: /* the handle is released at once: only the mapping keeps the memory */
        if (cuMemCreate(&handle, held->bytes, where, 0) != 0)
            break;
        held->pointer = __atomic_fetch_add(&next_address, 1ull << 32, __ATOMIC_RELAXED);
        if (cuMemMap(held->pointer, held->bytes, 0, handle, 0) != 0 || cuMemRelease(handle) != 0)
            abort();
        held->kind = 3;
    }
}

static void *churn(void *number)
{
    struct holding held[HELD] = {{0, 0, 0}};
    unsigned seed = first_seed + (unsigned)(uintptr_t)number;
    for (unsigned round = 0; round < rounds; round++) {
        struct holding *one = &held[rand_r(&seed) % HELD];
        if (one->kind != 0)
            let_go(one);
        else
            take(one, &seed);
        if (rand_r(&seed) % 32 == 0)
            cuCtxSynchronize();
    }
    for (int i = 0; i < HELD; i++)
        let_go(&held[i]);
    return NULL;
}

static void *launch_many(void *unused)
{
    (void)unused;
    for (unsigned i = 0; i < rounds; i++) {
        if (cuLaunchKernel(NULL, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL) != 0)
            abort();
        if (i % 16 == 15)
            cuCtxSynchronize();
    }
    return NULL;
}

static int to_come;

static void *launch_together(void *unused)
{
    (void)unused;
    __atomic_sub_fetch(&to_come, 1, __ATOMIC_ACQ_REL);
    while (__atomic_load_n(&to_come, __ATOMIC_ACQUIRE) > 0)
        sched_yield();
    if (cuLaunchKernel(NULL, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL) != 0)
        abort();
    return NULL;
}

static void run(int threads, void *(*work)(void *))
{
    pthread_t all[64];
    for (int i = 0; i < threads; i++)
        if (pthread_create(&all[i], NULL, work, (void *)(uintptr_t)i) != 0)
            abort();
    for (int i = 0; i < threads; i++)
        pthread_join(all[i], NULL);
}

static void report_and_wait(void)
{
    char line[16];
    printf("%llu\n", (unsigned long long)taken);
    fflush(stdout);
    if (fgets(line, sizeof line, stdin) == NULL)
        exit(0);
}

int main(int count, char **words)
{
    if (count < 3)
        return 2;
    if (strcmp(words[1], "greedy") == 0) {
        unit = strtoull(words[3], NULL, 10);
        run(atoi(words[2]), be_greedy);
        report_and_wait();
    } else if (strcmp(words[1], "churn") == 0) {
        rounds = (unsigned)atoi(words[3]);
        first_seed = (unsigned)atoi(words[4]);
        run(atoi(words[2]), churn);
        cuCtxSynchronize();
    } else if (strcmp(words[1], "launch") == 0) {
        for (int i = 0; i < atoi(words[2]); i++)
            if (cuLaunchKernel(NULL, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL) != 0)
                return 1;
        cuCtxSynchronize();
    } else if (strcmp(words[1], "launchers") == 0) {
        rounds = (unsigned)atoi(words[3]);
        run(atoi(words[2]), launch_many);
        cuCtxSynchronize();
    } else if (strcmp(words[1], "volley") == 0) {
        for (int i = 0; i < atoi(words[3]); i++) {
            pid_t child = fork();
            if (child == 0) {
                const struct itimerval soon = {.it_value = {.tv_usec = 5000}};
                uint64_t pointer;
                if (cuMemAlloc_v2(&pointer, 1) != 0)
                    return 1;
                setitimer(ITIMER_REAL, &soon, NULL);
                to_come = atoi(words[2]);
                run(to_come, launch_together);
                _exit(0);
            }
            int status;
            if (child < 0 || waitpid(child, &status, 0) != child || !WIFSIGNALED(status) || WTERMSIG(status) != SIGALRM)
                return 1;
        }
    } else if (strcmp(words[1], "exec") == 0) {
        uint64_t pointer;
        if (cuMemAlloc_v2(&pointer, strtoull(words[2], NULL, 10)) != 0)
            return 1;
        execl(words[0], words[0], "greedy", "1", words[2], (char *)NULL);
        return 1;
    } else if (strcmp(words[1], "fork") == 0) {
        unit = strtoull(words[3], NULL, 10);
        uint64_t own;
        if (cuMemAlloc_v2(&own, unit) != 0)
            return 1;
        taken = unit;
        for (int i = 0; i < 2; i++) {
            int channel[2];
            uint64_t more = 0;
            if (pipe(channel) != 0)
                return 1;
            long child = i == 0 ? fork() : syscall(SYS_clone, 17 /* SIGCHLD */, 0, 0, 0, 0);
            if (child == 0) {
                taken = 0;
                for (uint64_t p; taken < 2 * unit && cuMemAlloc_v2(&p, unit) == 0;)
                    taken += unit;
                if (write(channel[1], &taken, sizeof taken) != sizeof taken)
                    _exit(1);
                pause();
                _exit(0);
            }
            if (read(channel[0], &more, sizeof more) != sizeof more)
                return 1;
            taken += more;
        }
        report_and_wait();
    } else if (strcmp(words[1], "context") == 0) {
        void *context;
        unit = strtoull(words[3], NULL, 10);
        int code = words[2][0] == '0' ? cuDevicePrimaryCtxRetain(&context, 0) : cuCtxCreate_v2(&context, 0, 0);
        if (code != 0) {
            printf("refused %d\n", code);
            return 0;
        }
        be_greedy(NULL);
        report_and_wait();
    } else if (strcmp(words[1], "look") == 0) {
        size_t total = 0;
        unsigned long long info[3] = {0, 0, 0};
        if (cuDeviceTotalMem_v2(&total, 0) != 0 || nvmlDeviceGetMemoryInfo(NULL, info) != 0)
            return 1;
        printf("%zu %llu %llu\n", total, info[0], info[2]);
        fflush(stdout);
        getchar();
    } else if (strcmp(words[1], "closed") == 0) {
        for (int i = 3; i < 4096; i++)
            close(i);
        unit = strtoull(words[2], NULL, 10);
        be_greedy(NULL);
        report_and_wait();
    }
    return 0;
}

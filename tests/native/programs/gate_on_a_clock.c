/* The gate itself on a clock of its own, linked with all of native/: a line of moves in, the worst moment out.
 *
 *   k FUNCTION GRID NS COUNT   so many launches of a kernel; GRID 0: another one each time
 *   g GRAPH NS COUNT           so many launches of a graph
 *   x GRAPH                    destroys it
 *   u                          unloads all code
 *   p NS                       a pause
 *
 * The answer: the most device time that was in flight at any moment beside the longest launch of it, the most launches that were,
 * and how long the device was idle while a launch waited. Each line is a new process. */
#define _GNU_SOURCE
#include <linux/futex.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

extern uint64_t virtual_now, virtual_free_at, virtual_length, virtual_ends[4096], virtual_launches;
int cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                   void *stream, void **parameters, void **extra);
int cuGraphLaunch(void *graph, void *stream);
int cuGraphExecDestroy(void *graph);
int cuModuleUnload(void *code);

uint64_t __wrap_aim_now(void);
uint64_t __wrap_aim_now(void) { return virtual_now += 20; }
int __wrap_clock_nanosleep(clockid_t clock, int flags, const struct timespec *until, struct timespec *left);
int __wrap_clock_nanosleep(clockid_t clock, int flags, const struct timespec *until, struct timespec *left)
{
    uint64_t when = (uint64_t)until->tv_sec * 1000000000u + (uint64_t)until->tv_nsec + 5000; /* a thread wakes up late */
    (void)clock, (void)flags, (void)left;
    return virtual_now = when > virtual_now ? when : virtual_now, 0;
}
long __real_syscall(long number, ...);
long __wrap_syscall(long number, ...);
long __wrap_syscall(long number, ...)
{
    va_list list;
    long words[6];
    va_start(list, number);
    for (int i = 0; i < 6; i++)
        words[i] = va_arg(list, long);
    va_end(list);
    if (number != SYS_futex)
        return __real_syscall(number, words[0], words[1], words[2], words[3], words[4], words[5]);
    const struct timespec *wait = (const struct timespec *)words[3];
    if (words[1] == FUTEX_WAIT && wait != NULL)
        virtual_now += (uint64_t)wait->tv_sec * 1000000000u + (uint64_t)wait->tv_nsec;
    return 0;
}

static uint64_t worst, worst_ahead, idle;

static void look(void)
{
    uint64_t longest = 0, from = virtual_now, ahead = 0, kept = virtual_launches < 4096 ? virtual_launches : 4096;
    for (uint64_t i = virtual_launches - kept; i < virtual_launches; i++)
        if (virtual_ends[i % 4096] > virtual_now) {
            uint64_t left = virtual_ends[i % 4096] - from;
            longest = left > longest ? left : longest;
            from = virtual_ends[i % 4096];
            ahead++;
        }
    uint64_t beside = ahead == 0 ? 0 : virtual_free_at - virtual_now - longest;
    worst = beside > worst ? beside : worst;
    worst_ahead = ahead > worst_ahead ? ahead : worst_ahead;
}

static void launch(int graph, uint64_t handle, unsigned grid)
{
    uint64_t before = virtual_now, free_at = virtual_free_at;
    if (graph)
        cuGraphLaunch((void *)handle, NULL);
    else
        cuLaunchKernel((void *)handle, grid, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL);
    uint64_t from = free_at > before ? free_at : before;
    idle += virtual_now > from ? virtual_now - from : 0;
    look();
}

static void play(char *line)
{
    static unsigned fresh = 1u << 20;
    virtual_now = 1000000000000ull;
    for (char *rest = line, *word; (word = strtok_r(rest, " \n", &rest)) != NULL;) {
        uint64_t n[4] = {0};
        int count = *word == 'k' ? 4 : *word == 'g' ? 3 : *word == 'u' ? 0 : 1;
        for (int i = 0; i < count; i++)
            n[i] = strtoull(strtok_r(rest, " \n", &rest), NULL, 10);
        virtual_length = *word == 'k' ? n[2] : n[1];
        for (uint64_t i = 0; *word == 'k' && i < n[3]; i++)
            launch(0, 0x1000 + n[0], n[1] == 0 ? fresh++ : (unsigned)n[1]);
        for (uint64_t i = 0; *word == 'g' && i < n[2]; i++)
            launch(1, 0x2000 + n[0], 0);
        if (*word == 'x')
            cuGraphExecDestroy((void *)(0x2000 + n[0]));
        if (*word == 'u')
            cuModuleUnload((void *)1);
        if (*word == 'p')
            virtual_now += n[0];
    }
    printf("%llu %llu %llu\n", (unsigned long long)worst, (unsigned long long)worst_ahead, (unsigned long long)idle);
    fflush(stdout);
}

int main(void)
{
    char *line = NULL;
    size_t size = 0;
    while (getline(&line, &size, stdin) > 0) {
        pid_t child = fork();
        if (child == 0) {
            play(line);
            _exit(0);
        }
        int status = 1;
        waitpid(child, &status, 0);
        if (status != 0)
            return 1;
    }
    return 0;
}

/* One process that charges and gives back at random, linked with native/ built with AIM_STEPS: each of its steps waits until the
 * test gives it the turn (AIMGPU_STEPS names a shared file, AIMGPU_STEPS_AS this process in the model), and is written down.
 *
 *   region_steps SEED OPERATIONS CONTEXT
 *
 * It ends by SIGKILL before the step that the test chose, or after its operations. It keeps the turn, so that nothing happens
 * before the system has taken back what it held. */
#include "../../../native/aim.h"
#include "../../../native/steps.h"

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { UNIT = 64 << 20, PROCESSES = 4, STEPS = 1 << 14, DEATH = 50, EXEC = 51 };
static struct shared {
    int turn, wants[PROCESSES], dies_in[PROCESSES];
    unsigned count;
    unsigned char steps[STEPS][4];
} *shared;
static int me;
static uint64_t places; /* that the model has; the others are taken, and left out */

static void write_down(unsigned step, uint64_t place, uint64_t value)
{
    unsigned char *at = shared->steps[shared->count];
    at[0] = (unsigned char)me, at[1] = (unsigned char)step, at[2] = (unsigned char)place;
    at[3] = (unsigned char)(value < 200 ? value : 200);
    if (shared->count < STEPS - 1)
        shared->count++;
}

static void give_turn(void)
{
    store(&shared->wants[me], 0);
    store_release(&shared->turn, 0);
}

static void begin(void)
{
    int file = open(getenv("AIMGPU_STEPS"), O_RDWR | O_CLOEXEC);
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    me = atoi(getenv("AIMGPU_STEPS_AS"));
    places = (uint64_t)atoi(getenv("AIMGPU_STEPS_PLACES"));
    if (load(&shared->turn) == me) /* this process was another program */
        give_turn();
}

static void die(void)
{
    write_down(DEATH, 0, 0);
    kill(getpid(), SIGKILL);
}

void aim_step_begins(void)
{
    if (shared == NULL)
        begin();
    store(&shared->wants[me], 1);
    while (load_acquire(&shared->turn) != me) {
        struct timespec rest = {.tv_nsec = 20000};
        nanosleep(&rest, NULL);
    }
    if (shared->dies_in[me] > 0 && --shared->dies_in[me] == 0)
        die();
}

void aim_step_ends(enum aim_step step, uint64_t place, uint64_t value)
{
    int is_bytes = step == S_SUMMED || step == S_CAP || step == S_ADD || step == S_TAKE_AWAY || step == S_SET_USED ||
                   step == S_SET_CONTEXT || step == S_HOLDS;
    if (step != S_NO_STEP && place < places)
        write_down(step, place, is_bytes ? (value % UNIT == 0 ? value / UNIT : 200) : value);
    give_turn();
}

int main(int count, char **words)
{
    unsigned seed = count > 3 ? (unsigned)atoi(words[1]) : 0, left = count > 3 ? (unsigned)atoi(words[2]) : 0, held = 0;
    int context = count > 3 && atoi(words[3]), attached = 0;
    for (; left > 0; left--) {
        unsigned dice = (unsigned)rand_r(&seed) / 64 % 16;
        if (context && !attached)
            attached = aim_admit_context(0);
        else if (dice == 0) {
            char next[2][16];
            snprintf(next[0], sizeof next[0], "%u", seed);
            snprintf(next[1], sizeof next[1], "%u", left - 1);
            aim_step_begins();
            write_down(EXEC, 0, 0);
            execv(words[0], (char *[]){words[0], next[0], next[1], words[3], NULL});
        } else if (dice < 6 && held > 0) {
            held--;
            aim_give_back(0, UNIT);
        } else if (aim_try_reserve(0, UNIT)) {
            if (dice % 4 == 0)
                aim_give_back(0, UNIT); /* the driver refused */
            else
                held++;
        }
    }
    aim_step_begins();
    die();
    return 0;
}

/* How long launches take on the device, learned per kernel and grid, per graph, or per size of a copy, and per function over all
 * its grids. A launch whose own length is not known is taken for the longest recent one of its function, and where that is not
 * known either, for the longest recent one of the process.
 *
 * How many launches may be in flight together grows with every measurement that agrees with the ones before, and falls back to
 * one with the first that does not: a length may change with the data at any time, and what is in flight then takes its new
 * length. While a length varies, those in flight are few enough for its longest. */
#include "gate.h"

#include <string.h>

enum { SETS = 1024, WAYS = 8, SHORT_NS = 200000, DOUBTS = 3, MOST_TRUST = 3, AHEAD_NS = 48000, LEAST_AHEAD = 4, MOST_AHEAD = 8, MOST_GUESSED = 2 };
enum { VARIES = 4, STEADY = 64, VARYING_NS = 1000000 };

static struct length {
    uint64_t key, ns; /* typical; 0: not known */
    uint64_t longest; /* recently */
    uint64_t used;    /* when it was last asked for, counted in questions */
    unsigned trust, doubts;
    unsigned varies; /* measurements until it counts as steady again */
} lengths[SETS][WAYS];
static uint64_t questions, longest; /* longest: of all launches of this process, recently */
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

static struct length *set_of(uint64_t key) { return lengths[(key * 0x9e3779b97f4a7c15u >> 40) % SETS]; }

static struct length *find(uint64_t key)
{
    struct length *set = set_of(key);
    for (unsigned i = 0; i < WAYS; i++)
        if (set[i].key == key) {
            set[i].used = ++questions;
            return &set[i];
        }
    return NULL;
}

/* Its place, or that of the one in its set that was not asked for longest. */
static struct length *place(uint64_t key)
{
    struct length *length = find(key), *set = set_of(key);
    if (length != NULL)
        return length;
    length = &set[0];
    for (unsigned i = 1; i < WAYS; i++)
        if (set[i].used < length->used)
            length = &set[i];
    *length = (struct length){.key = key, .used = ++questions};
    return length;
}

/* As many as keep the device busy while the next ones are on their way; of a kernel whose length varies,
 * no more than fill a short time if each is as long as the longest. */
static unsigned most_of(const struct length *length)
{
    uint64_t enough = AHEAD_NS / (length->longest + 1) + LEAST_AHEAD, trusted = 1u << length->trust;
    enough = enough > MOST_AHEAD ? MOST_AHEAD : enough;
    if (length->varies != 0 && enough * length->longest > VARYING_NS)
        enough = VARYING_NS / length->longest + 1;
    return (unsigned)(trusted < enough ? trusted : enough);
}

static struct aim_expected expected(const struct aim_key *key)
{
    const struct length *own = find(key->exact), *function;
    if (own != NULL && own->ns != 0)
        return (struct aim_expected){.ns = own->ns, .most = most_of(own), .known = 1, .varies = own->varies != 0};
    function = key->function == key->exact ? NULL : find(key->function);
    if (function != NULL && function->ns != 0)
        return (struct aim_expected){.ns = function->longest, .most = function->trust > 0 ? MOST_GUESSED : 1, .known = 1};
    return (struct aim_expected){.ns = longest, .most = 1};
}

struct aim_expected aim_length_of(const struct aim_key *key)
{
    pthread_mutex_lock(&mutex);
    struct aim_expected found = expected(key);
    pthread_mutex_unlock(&mutex);
    return found;
}

/* What is longer than all recent ones counts at once; shorter ones lower the longest slowly. */
static void learn(struct length *length, uint64_t measured)
{
    measured = measured == 0 ? 1 : measured;
    int agrees = length->ns != 0 && measured <= 2 * length->longest + SHORT_NS / 10;
    int differs = length->ns != 0 && (measured > VARIES * length->ns + SHORT_NS / 10 || length->ns > VARIES * measured + SHORT_NS / 10);
    length->varies = differs ? STEADY : length->varies - (length->varies != 0);
    length->trust = !agrees ? 0 : length->trust < MOST_TRUST ? length->trust + 1 : MOST_TRUST;
    length->ns = agrees ? (3 * length->ns + measured + 3) / 4 : measured;
    length->longest = measured > length->longest ? measured : length->longest - (length->longest - measured) / 32;
}

static void learn_both(const struct aim_key *key, uint64_t measured)
{
    longest = measured > longest ? measured : longest - (longest - measured) / 256;
    learn(place(key->exact), measured);
    if (key->function != key->exact)
        learn(place(key->function), measured);
}

/* A launch alone between two events. The first launch of a kernel may load it, and the events then enclose the time of loading;
 * such a measurement is repeated, a few times at most. */
static void learn_alone(const struct aim_key *key, const struct aim_measured *took)
{
    struct length *length = place(key->exact);
    if (length->ns == 0 && took->ns >= SHORT_NS && took->call_ns * 4 > took->ns && ++length->doubts < DOUBTS)
        return;
    learn_both(key, took->ns);
}

/* A batch took longer or shorter than was expected, with this key among others. One that took much longer says that a length in
 * it has changed, and which only where all its launches are alike: each is measured alone again. */
static void learn_in_batch(const struct aim_key *key, const struct aim_measured *took)
{
    struct length *length = find(key->exact);
    if (length == NULL || length->ns == 0) /* counted in by the length of its function */
        length = find(key->function);
    if (length == NULL || length->ns == 0 || took->expected_ns == 0)
        return;
    if (took->ns > 2 * took->expected_ns + SHORT_NS / 10) {
        uint64_t others = took->expected_ns / took->launches * (took->launches - 1);
        length->trust = 0;
        if (took->keys == 1 && took->ns - others > length->longest) {
            length->longest = took->ns - others;
            length->varies = STEADY;
        }
    } else
        learn_both(key, (uint64_t)((double)length->ns * ((double)took->ns / (double)took->expected_ns)));
}

/* Beside another tenant's work the events enclose its turns too, so a known length can only become shorter. */
void aim_length_measured(const struct aim_key *key, const struct aim_measured *took)
{
    pthread_mutex_lock(&mutex);
    const struct length *known = took->beside ? find(key->exact) : NULL;
    if (known == NULL || known->ns == 0 || took->ns < took->expected_ns) {
        if (took->launches == 1)
            learn_alone(key, took);
        else
            learn_in_batch(key, took);
    }
    pthread_mutex_unlock(&mutex);
}

/* A graph was destroyed: its handle may be given out again, for another graph. */
void aim_length_forget(const struct aim_key *key)
{
    pthread_mutex_lock(&mutex);
    struct length *length = find(key->exact);
    if (length != NULL)
        memset(length, 0, sizeof *length);
    pthread_mutex_unlock(&mutex);
}

/* Code was unloaded: the handles of its functions may be given out again. */
void aim_lengths_forget(void)
{
    pthread_mutex_lock(&mutex);
    memset(lengths, 0, sizeof lengths);
    pthread_mutex_unlock(&mutex);
}

void aim_lengths_after_fork(void) { pthread_mutex_init(&mutex, NULL); }

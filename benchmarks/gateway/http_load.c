/* The two ends of the gateway benchmark, in C so that neither is what is measured.
 *
 *   http_load serve                  an engine: JSON at once, or 50 SSE chunks, in one burst or, where the body says "paced",
 *                                    10 ms apart, as tokens come; prints its port
 *   http_load load PORT CONNECTIONS[@RATE] SECONDS BODY_FILE [HEADER]   closed loop: each connection asks again when it has its
 *                                    answer; with a rate, so many requests begin each second at even distances, and those that
 *                                    find no free connection are missed. Prints one JSON object with counts and percentiles
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

#define BUFFER 65536
#define CHUNKS 50
#define GAP_NS 10000000ull
#define MAX_SAMPLES 4000000

struct conn {
    int fd;
    size_t length;
    char data[BUFFER];
    uint64_t began, first;       /* load: when asked, when the first byte came */
    long content_length, body;   /* load: -1 is chunked */
    char tail[8];                /* load: the last bytes of a chunked body */
    int left;                    /* serve: chunks still to send */
    uint64_t next;               /* serve: when */
    struct conn *after;          /* serve: list of running streams; load: of free connections */
};

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
}

static void die(const char *what) {
    perror(what);
    exit(1);
}

static void write_all(int fd, const char *data, size_t length) {
    while (length) {
        ssize_t n = write(fd, data, length);
        if (n < 0) {
            if (errno == EAGAIN) continue;
            return;
        }
        data += n;
        length -= (size_t)n;
    }
}

static void set_up(int fd) {
    int one = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
}

/* ---- serve ---- */

static const char JSON_BODY[] =
    "{\"id\":\"chatcmpl-1\",\"object\":\"chat.completion\",\"created\":1,\"model\":\"m\",\"choices\":[{\"index\":0,"
    "\"finish_reason\":\"stop\",\"message\":{\"role\":\"assistant\",\"content\":\"Hello! How can I help you today?\"}}],"
    "\"usage\":{\"prompt_tokens\":12,\"completion_tokens\":9,\"total_tokens\":21}}";
static const char EVENT[] =
    "data: {\"id\":\"chatcmpl-1\",\"object\":\"chat.completion.chunk\",\"created\":1,\"model\":\"m\",\"choices\":[{\"index\":0,"
    "\"delta\":{\"content\":\" token\"},\"finish_reason\":null}]}\n\n";
static const char STREAM_HEAD[] =
    "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";

static struct conn *streams;

static void send_chunk(struct conn *c) {
    char out[512];
    const char *text = c->left == 1 ? "data: [DONE]\n\n" : EVENT;
    int n = snprintf(out, sizeof out, "%zx\r\n%s\r\n%s", strlen(text), text, c->left == 1 ? "0\r\n\r\n" : "");
    write_all(c->fd, out, (size_t)n);
    c->left--;
}

static void answer(struct conn *c, int streaming, int paced) {
    if (!streaming) {
        char out[1024];
        int n = snprintf(out, sizeof out, "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %zu\r\n\r\n%s",
                         sizeof JSON_BODY - 1, JSON_BODY);
        write_all(c->fd, out, (size_t)n);
        return;
    }
    write_all(c->fd, STREAM_HEAD, sizeof STREAM_HEAD - 1);
    c->left = CHUNKS;
    if (!paced) {
        while (c->left) send_chunk(c);
        return;
    }
    send_chunk(c);
    c->next = now_ns() + GAP_NS;
    c->after = streams;
    streams = c;
}

static void take_requests(struct conn *c) {
    for (;;) {
        c->data[c->length] = 0;
        char *end = strstr(c->data, "\r\n\r\n");
        if (!end) return;
        char *field = strcasestr(c->data, "content-length:");
        size_t body = field && field < end ? strtoul(field + 15, NULL, 10) : 0;
        size_t whole = (size_t)(end + 4 - c->data) + body;
        if (c->length < whole) return;
        char *flag = memmem(end + 4, body, "\"stream\"", 8);
        int streaming = flag && memmem(flag, (size_t)(c->data + whole - flag), "true", 4);
        answer(c, streaming, memmem(end + 4, body, "paced", 5) != NULL);
        memmove(c->data, c->data + whole, c->length - whole);
        c->length -= whole;
    }
}

static void forget(struct conn *c) {
    for (struct conn **p = &streams; *p; p = &(*p)->after)
        if (*p == c) {
            *p = c->after;
            break;
        }
    close(c->fd);
    free(c);
}

static void run_streams(void) {
    uint64_t now = now_ns();
    for (struct conn **p = &streams; *p;) {
        struct conn *c = *p;
        if (c->next <= now) {
            send_chunk(c);
            c->next += GAP_NS;
        }
        if (!c->left)
            *p = c->after;
        else
            p = &c->after;
    }
}

static void serve(void) {
    int listener = socket(AF_INET, SOCK_STREAM, 0), poll = epoll_create1(0);
    struct sockaddr_in where = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof where;
    if (bind(listener, (struct sockaddr *)&where, sizeof where) || listen(listener, 4096)) die("listen");
    getsockname(listener, (struct sockaddr *)&where, &size);
    printf("%d\n", ntohs(where.sin_port));
    fflush(stdout);
    struct epoll_event want = {.events = EPOLLIN}, got[256];
    epoll_ctl(poll, EPOLL_CTL_ADD, listener, &want);
    for (;;) {
        int n = epoll_wait(poll, got, 256, streams ? 1 : -1);
        for (int i = 0; i < n; i++) {
            struct conn *c = got[i].data.ptr;
            if (!c) {
                c = calloc(1, sizeof *c);
                c->fd = accept(listener, NULL, NULL);
                set_up(c->fd);
                want.data.ptr = c;
                epoll_ctl(poll, EPOLL_CTL_ADD, c->fd, &want);
                want.data.ptr = NULL;
                continue;
            }
            ssize_t r = read(c->fd, c->data + c->length, BUFFER - 1 - c->length);
            if (r <= 0) {
                if (r < 0 && errno == EAGAIN) continue;
                forget(c);
                continue;
            }
            c->length += (size_t)r;
            take_requests(c);
        }
        if (streams) run_streams();
    }
}

/* ---- load ---- */

static uint32_t whole_us[MAX_SAMPLES], first_us[MAX_SAMPLES];
static size_t samples, errors, missed;
static struct conn *idle;

static int by_value(const void *a, const void *b) {
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return x < y ? -1 : x > y;
}

static double percentile(uint32_t *values, double part) {
    return samples ? values[(size_t)(part * (double)(samples - 1))] / 1000.0 : -1;
}

static void ask(struct conn *c, const char *request, size_t length) {
    c->began = now_ns();
    c->first = 0;
    c->length = 0;
    c->content_length = -2;
    c->body = 0;
    memset(c->tail, 0, sizeof c->tail);
    write_all(c->fd, request, length);
}

/* True when the answer is complete. */
static int take_answer(struct conn *c, const char *data, size_t n) {
    if (c->content_length == -2) {
        if (c->length + n > BUFFER - 1) n = BUFFER - 1 - c->length;
        memcpy(c->data + c->length, data, n);
        c->length += n;
        c->data[c->length] = 0;
        char *end = strstr(c->data, "\r\n\r\n");
        if (!end) return 0;
        if (strncmp(c->data, "HTTP/1.1 200", 12)) errors++;
        char *field = strcasestr(c->data, "content-length:");
        c->content_length = field && field < end ? strtol(field + 15, NULL, 10) : -1;
        data = end + 4;
        n = c->length - (size_t)(data - c->data);
    }
    c->body += (long)n;
    if (c->content_length >= 0) return c->body >= c->content_length;
    for (size_t i = n > 5 ? n - 5 : 0; i < n; i++) {
        memmove(c->tail, c->tail + 1, 4);
        c->tail[4] = data[i];
    }
    return memcmp(c->tail, "0\r\n\r\n", 5) == 0;
}

static void set_free(struct conn *c) {
    c->after = idle;
    idle = c;
}

/* How many requests are to begin by the clock's last ticks. */
static void begin_some(int clock, const char *request, size_t length) {
    uint64_t ticks = 0;
    if (read(clock, &ticks, sizeof ticks) < 0) return;
    for (; ticks; ticks--) {
        struct conn *c = idle;
        if (!c) {
            missed++;
            continue;
        }
        idle = c->after;
        ask(c, request, length);
    }
}

static int start_clock(int poll, int rate) {
    int clock = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
    struct itimerspec every = {.it_interval.tv_nsec = 1000000000L / rate, .it_value.tv_nsec = 1000000000L / rate};
    struct epoll_event want = {.events = EPOLLIN};
    timerfd_settime(clock, 0, &every, NULL);
    epoll_ctl(poll, EPOLL_CTL_ADD, clock, &want);
    return clock;
}

static int load(int port, int count, int rate, double seconds, const char *request, size_t length) {
    int poll = epoll_create1(0);
    struct sockaddr_in where = {
        .sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct epoll_event got[256];
    static char data[BUFFER];
    for (int i = 0; i < count; i++) {
        struct conn *c = calloc(1, sizeof *c);
        c->fd = socket(AF_INET, SOCK_STREAM, 0);
        if (connect(c->fd, (struct sockaddr *)&where, sizeof where)) die("connect");
        set_up(c->fd);
        struct epoll_event want = {.events = EPOLLIN, .data.ptr = c};
        epoll_ctl(poll, EPOLL_CTL_ADD, c->fd, &want);
        if (memmem(request, length, "paced", 5)) usleep((useconds_t)(CHUNKS * GAP_NS / 1000 / (uint64_t)count)); /* not all at once */
        if (rate)
            set_free(c);
        else
            ask(c, request, length);
    }
    int clock = rate ? start_clock(poll, rate) : -1;
    uint64_t began = now_ns(), warm = began + (uint64_t)(seconds * 0.1e9), end = began + (uint64_t)(seconds * 1e9);
    uint64_t counted_from = 0;
    while (now_ns() < end) {
        int n = epoll_wait(poll, got, 256, 100);
        for (int i = 0; i < n; i++) {
            struct conn *c = got[i].data.ptr;
            if (!c) {
                begin_some(clock, request, length);
                continue;
            }
            ssize_t r = read(c->fd, data, sizeof data);
            if (r <= 0) {
                if (r < 0 && errno == EAGAIN) continue;
                die("the server closed a connection");
            }
            uint64_t now = now_ns();
            if (!c->first) c->first = now;
            if (!take_answer(c, data, (size_t)r)) continue;
            if (now >= warm && samples < MAX_SAMPLES) {
                if (!counted_from) counted_from = now;
                whole_us[samples] = (uint32_t)((now - c->began) / 1000);
                first_us[samples++] = (uint32_t)((c->first - c->began) / 1000);
            }
            if (rate)
                set_free(c);
            else
                ask(c, request, length);
        }
    }
    double took = (double)(now_ns() - counted_from) / 1e9;
    qsort(whole_us, samples, sizeof *whole_us, by_value);
    qsort(first_us, samples, sizeof *first_us, by_value);
    printf("{\"requests\": %zu, \"errors\": %zu, \"missed\": %zu, \"requests_per_second\": %.1f, \"p50_ms\": %.3f, \"p99_ms\": %.3f, "
           "\"first_byte_p50_ms\": %.3f, \"first_byte_p99_ms\": %.3f}\n",
           samples, errors, missed, (double)samples / took, percentile(whole_us, 0.5), percentile(whole_us, 0.99),
           percentile(first_us, 0.5), percentile(first_us, 0.99));
    return errors != 0;
}

int main(int argc, char **argv) {
    signal(SIGPIPE, SIG_IGN);
    if (argc >= 2 && !strcmp(argv[1], "serve")) serve();
    if (argc < 6 || strcmp(argv[1], "load")) {
        fprintf(stderr, "usage: http_load serve | load PORT CONNECTIONS[@RATE] SECONDS BODY_FILE [HEADER]\n");
        return 2;
    }
    static char body[BUFFER], request[2 * BUFFER];
    FILE *file = fopen(argv[5], "r");
    if (!file) die(argv[5]);
    size_t size = fread(body, 1, sizeof body - 1, file);
    fclose(file);
    int n = snprintf(request, sizeof request,
                     "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n%s%s"
                     "content-length: %zu\r\n\r\n%.*s",
                     argc > 6 ? argv[6] : "", argc > 6 ? "\r\n" : "", size, (int)size, body);
    const char *rate = strchr(argv[3], '@');
    return load(atoi(argv[2]), atoi(argv[3]), rate ? atoi(rate + 1) : 0, atof(argv[4]), request, (size_t)n);
}

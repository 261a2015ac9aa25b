/* An engine that costs next to nothing: 200 of them must not disturb what is measured of the daemon.
 * Usage: daemon_engine RUN_DIRECTORY LOAD_MILLISECONDS [RECORD]. Answers 503 to everything until it has "loaded", then 200.
 * With RECORD, a request that holds "request-NUMBER" is appended to that file when it is begun, takes some milliseconds, and is
 * answered with that word: so a request that two engines began shows, and an answer to another's request too. */
#include <arpa/inet.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define CONNECTIONS 256

static const char answer[] =
    "{\"id\":\"x\",\"object\":\"chat.completion\",\"model\":\"m\",\"choices\":[{\"index\":0,\"finish_reason\":\"stop\","
    "\"message\":{\"role\":\"assistant\",\"content\":\"%s\"}}],"
    "\"usage\":{\"prompt_tokens\":1,\"completion_tokens\":1,\"total_tokens\":2}}";
static const char *record; /* NULL: requests are not recorded */

static double now_seconds(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

static int write_endpoint(const char *folder, int port) {
    char path[4096], scratch[4200];
    snprintf(path, sizeof path, "%s/endpoint.json", folder);
    snprintf(scratch, sizeof scratch, "%s.new", path);
    FILE *file = fopen(scratch, "w");
    if (file == NULL) return -1;
    fprintf(file, "{\"url\": \"http://127.0.0.1:%d\"}", port);
    return fclose(file) == 0 ? rename(scratch, path) : -1;
}

/* The word of the request, "hello" where it has none; written down before anything is answered. */
static void find_word(const char *request, char *word, size_t size) {
    const char *found = record == NULL ? NULL : strstr(request, "request-");
    if (found == NULL || sscanf(found, "%40[a-z0-9-]", word) != 1) {
        snprintf(word, size, "hello");
        return;
    }
    char line[64];
    int length = snprintf(line, sizeof line, "%s\n", word);
    int file = open(record, O_WRONLY | O_APPEND | O_CREAT, 0600);
    if (file < 0 || write(file, line, (size_t)length) != length) abort();
    close(file);
    usleep(3000);
}

/* One request is one read: the daemon's and the benchmark's requests are small. Bodies that come later are read and dropped. */
static int serve(int connection, int ready) {
    char request[65536], response[1024], body[512], word[48];
    ssize_t got = read(connection, request, sizeof request - 1);
    if (got <= 0) return -1;
    request[got] = 0;
    if (strncmp(request, "GET ", 4) != 0 && strncmp(request, "POST ", 5) != 0) return 0;
    char *end = strstr(request, "\r\n\r\n");
    char *length = strcasestr(request, "content-length:");
    if (end != NULL && length != NULL && request + got - (end + 4) < atoi(length + 15)) {
        got = read(connection, request, sizeof request - 1);
        if (got <= 0) return -1;
        request[got] = 0;
    }
    find_word(request, word, sizeof word);
    int used = snprintf(body, sizeof body, answer, word);
    int size = snprintf(response, sizeof response,
                        "HTTP/1.1 %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s",
                        ready ? "200 OK" : "503 Service Unavailable", used, body);
    return write(connection, response, (size_t)size) == size ? 0 : -1;
}

int main(int count, char **arguments) {
    if (count < 3) return 2;
    if (count > 3) record = arguments[3];
    double ready_at = now_seconds() + atof(arguments[2]) / 1000;
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof address;
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    if (bind(listener, (struct sockaddr *)&address, size) != 0 || listen(listener, 128) != 0) return 1;
    getsockname(listener, (struct sockaddr *)&address, &size);
    if (write_endpoint(arguments[1], ntohs(address.sin_port)) != 0) return 1;
    struct pollfd polled[CONNECTIONS] = {{.fd = listener, .events = POLLIN}};
    int used = 1;
    for (;;) {
        if (poll(polled, (nfds_t)used, -1) < 0) return 1;
        for (int i = used - 1; i > 0; i--) {
            if (polled[i].revents != 0 && serve(polled[i].fd, now_seconds() >= ready_at) != 0) {
                close(polled[i].fd);
                polled[i] = polled[--used];
            }
        }
        if (polled[0].revents != 0 && used < CONNECTIONS) {
            int connection = accept(listener, NULL, NULL);
            if (connection >= 0) polled[used++] = (struct pollfd){.fd = connection, .events = POLLIN};
        }
    }
}

/* Run in a container before its own program: its loader must be able to load the interposer, or the container does not start.
 *
 *     check LOADER LIBRARY
 *
 * Static, so that it runs in any image. The kubelet shows what is written to the termination log as the pod's reason.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static int refuse(const char *reason)
{
    char text[1024];
    int length = snprintf(text, sizeof text,
                          "aimgpu: this container was promised enforced limits of its GPU, and %s. "
                          "Use an image with glibc 2.17 or newer, or ask for no enforced isolation.\n",
                          reason);
    int log = open("/dev/termination-log", O_WRONLY | O_APPEND | O_CLOEXEC);
    for (int i = 0; i < 2; i++)
        if (write(i ? 2 : log, text, (size_t)length) < 0)
            continue;
    return 1;
}

int main(int count, char **words)
{
    int output[2], status = 0;
    if (count != 3 || pipe(output))
        return refuse("its image could not be checked");
    if (access(words[1], X_OK))
        return refuse("its image has no glibc to load them with");
    pid_t child = fork();
    if (child == 0) {
        dup2(output[1], 2);
        execl(words[1], words[1], words[2], (char *)0);
        _exit(127);
    }
    close(output[1]);
    char said[512] = "";
    ssize_t length = read(output[0], said, sizeof said - 1);
    if (child < 0 || waitpid(child, &status, 0) < 0)
        return refuse("its image could not be checked");
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0)
        return 0;
    said[length > 0 ? length : 0] = 0;
    said[strcspn(said, "\n")] = 0;
    char reason[640];
    snprintf(reason, sizeof reason, "its glibc cannot load them: %s", said);
    return refuse(reason);
}

/* Running a command that stops at some system calls: what recorder.c and jitter.c share. */
#include <errno.h>
#include <linux/filter.h>
#include <linux/ptrace.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

/* <sys/ptrace.h> and <linux/ptrace.h> do not go together everywhere. */
extern long ptrace(int request, ...);

static pid_t program;

static void die(const char *what)
{
	perror(what);
	exit(125);
}

/* In the child: stops at the calls that are watched, and becomes the command, with these signals blocked. */
static void run(char **command, const long *watched, size_t count, const sigset_t *blocked)
{
	struct sock_filter filter[count + 3];
	struct sock_fprog code = {.len = (unsigned short) (count + 3), .filter = filter};

	filter[0] = (struct sock_filter) BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
	for (size_t i = 0; i < count; i++)
		filter[i + 1] = (struct sock_filter) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t) watched[i], (uint8_t) (count - i), 0);
	filter[count + 1] = (struct sock_filter) BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
	filter[count + 2] = (struct sock_filter) BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRACE);
	if (ptrace(PTRACE_TRACEME, 0, 0, 0) < 0 || raise(SIGSTOP) != 0 || sigprocmask(SIG_SETMASK, blocked, NULL) < 0 ||
		prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0 || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &code) < 0)
		die("tracing");
	execvp(command[0], command);
	die(command[0]);
}

static void pass_on(int number)
{
	if (program > 0)
		kill(program, number);
}

static void resume(int request, pid_t thread, int number)
{
	/* It may have been killed meanwhile. */
	if (ptrace(request, thread, 0, (long) number) < 0 && errno != ESRCH)
		die("ptrace");
}

/* Starts the command, which ends with us; what asks us to end is passed on to it. */
static void start(char **command, const long *watched, size_t count, const sigset_t *blocked)
{
	const int passed[] = {SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2};
	int status;

	if ((program = fork()) == 0)
		run(command, watched, count, blocked);
	if (program < 0 || waitpid(program, &status, 0) < 0 ||
		ptrace(PTRACE_SETOPTIONS, program, 0, (long) (PTRACE_O_TRACESYSGOOD | PTRACE_O_TRACESECCOMP | PTRACE_O_TRACECLONE |
													  PTRACE_O_TRACEFORK | PTRACE_O_TRACEVFORK | PTRACE_O_TRACEEXEC |
													  PTRACE_O_EXITKILL)) < 0)
		die("tracing");
	for (size_t i = 0; i < sizeof passed / sizeof passed[0]; i++)
		sigaction(passed[i], &(struct sigaction) {.sa_handler = pass_on}, NULL);
	resume(PTRACE_CONT, program, 0);
}

/* What we end with where the command ended so. */
static int code_of(int status)
{
	return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

/* A switch whose ports have a rate and a delay, each in a network namespace of its own.
 *
 *     slow_link NUM_HOSTS BITS_PER_S DELAY_S INTERFACE
 *
 * It stands in for tc's netem, which not every kernel has. Each host is a new namespace with an interface (TAP)
 * of the address 198.19.0.HOST+1/24, which RFC 2544 keeps for measurements. A frame leaves its host at the rate,
 * is under way for the delay, and arrives at the rate. The namespaces have no names: they exist as long as this
 * process and those in them, and nothing has to be removed. Standard output tells, for each host, the descriptor
 * of its namespace, and then "ready". The end of standard input ends the program, which then writes how many
 * frames there were and how late they came.
 *
 * Frames stay as large as TCP made them (TSO, up to 64 KiB), which saves system calls; the time on the wire is
 * counted as if they were cut into segments. A host whose wire is busy is not read from.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_arp.h>
#include <linux/if_tun.h>
#include <linux/virtio_net.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum {
    MAX_HOSTS = 16,
    MAX_FRAME_BYTES = 70000,
    MAX_UNDER_WAY = 4096,               /* frames on their way to one host */
    OFFLOAD_BYTES = sizeof(struct virtio_net_hdr),
    ETHERNET_BYTES = 14,
    AROUND_A_FRAME_BYTES = 24,          /* preamble, checksum and gap */
    AHEAD_NS = 300000,                  /* a host is read from so long before its wire is free */
};

struct buffer {
    struct buffer *next;
    int num_users;
    unsigned char bytes[MAX_FRAME_BYTES];
};

struct frame {
    uint64_t arrives_ns;
    int num_bytes;
    struct buffer *buffer;
};

struct host {
    int tap;
    uint64_t sends_until_ns, receives_until_ns;
    struct frame under_way[MAX_UNDER_WAY];      /* a ring, in the order of arrival */
    int first, count;
};

static struct host hosts[MAX_HOSTS];
static struct buffer *unused;
static int num_hosts;
static double ns_per_byte;
static uint64_t delay_ns;
static uint64_t num_frames, num_wire_bytes, num_lost, sum_late_ns, most_late_ns;

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void must(int is_done, const char *what) {
    if (is_done) return;
    fprintf(stderr, "slow_link: %s: %s\n", what, strerror(errno));
    exit(1);
}

static void bring_up(int control, const char *name) {
    struct ifreq request = {0};
    strncpy(request.ifr_name, name, IFNAMSIZ - 1);
    must(ioctl(control, SIOCGIFFLAGS, &request) == 0, "SIOCGIFFLAGS");
    request.ifr_flags |= IFF_UP;
    must(ioctl(control, SIOCSIFFLAGS, &request) == 0, "SIOCSIFFLAGS");
}

static void set_address(int control, const char *name, unsigned long kind, const char *address) {
    struct ifreq request = {0};
    strncpy(request.ifr_name, name, IFNAMSIZ - 1);
    struct sockaddr_in *in = (struct sockaddr_in *)&request.ifr_addr;
    in->sin_family = AF_INET;
    inet_pton(AF_INET, address, &in->sin_addr);
    must(ioctl(control, kind, &request) == 0, "an address");
}

/* Makes a namespace with an interface; returns the TAP's descriptor. The namespace stays open in this process. */
static int make_host(int number, const char *interface) {
    must(unshare(CLONE_NEWNET) == 0, "unshare");
    int namespace = open("/proc/self/ns/net", O_RDONLY);
    int tap = open("/dev/net/tun", O_RDWR | O_NONBLOCK);
    must(namespace >= 0 && tap >= 0, "/dev/net/tun");
    struct ifreq request = {0};
    strncpy(request.ifr_name, interface, IFNAMSIZ - 1);
    request.ifr_flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR;
    must(ioctl(tap, TUNSETIFF, &request) == 0, "TUNSETIFF");
    must(ioctl(tap, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4) == 0, "TUNSETOFFLOAD");
    int control = socket(AF_INET, SOCK_DGRAM, 0);
    must(control >= 0, "socket");
    /* The last byte of a host's Ethernet address is its number. */
    unsigned char hardware[6] = {2, 0, 0, 0, 0, (unsigned char)number};
    request.ifr_hwaddr.sa_family = ARPHRD_ETHER;
    memcpy(request.ifr_hwaddr.sa_data, hardware, sizeof hardware);
    must(ioctl(control, SIOCSIFHWADDR, &request) == 0, "SIOCSIFHWADDR");
    char address[32];
    snprintf(address, sizeof address, "198.19.0.%d", number + 1);
    set_address(control, interface, SIOCSIFADDR, address);
    set_address(control, interface, SIOCSIFNETMASK, "255.255.255.0");
    bring_up(control, interface);
    bring_up(control, "lo");
    close(control);
    printf("%d\n", namespace);
    return tap;
}

/* The bytes that a frame takes on the wire once it is cut into segments, each with headers of its own. */
static int wire_bytes(const unsigned char *bytes, int num_bytes) {
    const struct virtio_net_hdr *offload = (const void *)bytes;
    int wire = num_bytes - OFFLOAD_BYTES, segments = 1;
    if (offload->gso_type != VIRTIO_NET_HDR_GSO_NONE && offload->gso_size) {
        int content = wire - offload->hdr_len;
        segments = (content + offload->gso_size - 1) / offload->gso_size;
        wire += (segments - 1) * offload->hdr_len;
    }
    return wire + segments * AROUND_A_FRAME_BYTES;
}

static struct buffer *take_buffer(void) {
    struct buffer *buffer = unused;
    if (buffer)
        unused = buffer->next;
    else
        must((buffer = malloc(sizeof *buffer)) != NULL, "malloc");
    buffer->num_users = 1;
    return buffer;
}

static void release(struct buffer *buffer) {
    if (--buffer->num_users) return;
    buffer->next = unused;
    unused = buffer;
}

static void send_to(struct host *to, struct buffer *buffer, int num_bytes, uint64_t leaves_ns, double wire_ns) {
    if (to->count == MAX_UNDER_WAY) {
        num_lost++;
        return;
    }
    uint64_t arrives_ns = leaves_ns + delay_ns;
    if (arrives_ns < to->receives_until_ns + (uint64_t)wire_ns) arrives_ns = to->receives_until_ns + (uint64_t)wire_ns;
    to->receives_until_ns = arrives_ns;
    buffer->num_users++;
    to->under_way[(to->first + to->count++) % MAX_UNDER_WAY] = (struct frame){arrives_ns, num_bytes, buffer};
}

static void carry(int number, struct buffer *buffer, int num_bytes) {
    const unsigned char *to = buffer->bytes + OFFLOAD_BYTES;
    if (to[12] == 0x86 && to[13] == 0xdd) return;  /* IPv6's announcements */
    struct host *from = &hosts[number];
    uint64_t now = now_ns();
    int wire = wire_bytes(buffer->bytes, num_bytes);
    double wire_ns = wire * ns_per_byte;
    if (from->sends_until_ns < now) from->sends_until_ns = now;
    from->sends_until_ns += (uint64_t)wire_ns;
    num_frames++;
    num_wire_bytes += (uint64_t)wire;
    for (int other = 0; other < num_hosts; other++)
        if (other != number && (to[0] & 1 || to[5] == other))
            send_to(&hosts[other], buffer, num_bytes, from->sends_until_ns, wire_ns);
}

static void read_from(int number) {
    struct buffer *buffer = take_buffer();
    int num_bytes = (int)read(hosts[number].tap, buffer->bytes, sizeof buffer->bytes);
    if (num_bytes > (int)OFFLOAD_BYTES + ETHERNET_BYTES) carry(number, buffer, num_bytes);
    release(buffer);
}

/* Hands over what has arrived; returns when the next frame will, or UINT64_MAX. */
static uint64_t deliver(struct host *to) {
    while (to->count) {
        struct frame *frame = &to->under_way[to->first];
        uint64_t now = now_ns();
        if (frame->arrives_ns > now) return frame->arrives_ns;
        uint64_t late_ns = now - frame->arrives_ns;
        sum_late_ns += late_ns;
        if (late_ns > most_late_ns) most_late_ns = late_ns;
        if (write(to->tap, frame->buffer->bytes, (size_t)frame->num_bytes) < 0) num_lost++;
        release(frame->buffer);
        to->first = (to->first + 1) % MAX_UNDER_WAY;
        to->count--;
    }
    return UINT64_MAX;
}

int main(int argc, char **argv) {
    if (argc != 5) {
        fprintf(stderr, "usage: slow_link NUM_HOSTS BITS_PER_S DELAY_S INTERFACE\n");
        return 2;
    }
    num_hosts = atoi(argv[1]);
    ns_per_byte = 8e9 / atof(argv[2]);
    delay_ns = (uint64_t)(1e9 * atof(argv[3]));
    if (num_hosts < 2 || num_hosts > MAX_HOSTS) {
        fprintf(stderr, "slow_link: 2 to %d hosts\n", MAX_HOSTS);
        return 2;
    }
    for (int number = 0; number < num_hosts; number++) hosts[number].tap = make_host(number, argv[4]);
    prctl(PR_SET_TIMERSLACK, 1);
    struct sched_param priority = {.sched_priority = 10};
    if (sched_setscheduler(0, SCHED_FIFO, &priority)) perror("slow_link: no real-time priority, times are less exact");
    printf("ready\n");
    fflush(stdout);
    for (;;) {
        struct pollfd polled[MAX_HOSTS + 1];
        uint64_t next_ns = UINT64_MAX;
        for (int number = 0; number < num_hosts; number++) {
            uint64_t arrives_ns = deliver(&hosts[number]);
            if (arrives_ns < next_ns) next_ns = arrives_ns;
        }
        uint64_t now = now_ns();
        for (int number = 0; number < num_hosts; number++) {
            uint64_t until_ns = hosts[number].sends_until_ns;
            int is_busy = until_ns > now + AHEAD_NS;
            if (is_busy && until_ns - AHEAD_NS < next_ns) next_ns = until_ns - AHEAD_NS;
            polled[number] = (struct pollfd){.fd = is_busy ? -1 : hosts[number].tap, .events = POLLIN};
        }
        polled[num_hosts] = (struct pollfd){.fd = 0, .events = POLLIN};
        uint64_t wait_ns = next_ns > now ? next_ns - now : 0;
        struct timespec wait = {(time_t)(wait_ns / 1000000000u), (long)(wait_ns % 1000000000u)};
        if (ppoll(polled, (nfds_t)num_hosts + 1, next_ns == UINT64_MAX ? NULL : &wait, NULL) < 0)
            must(errno == EINTR, "ppoll");
        else if (polled[num_hosts].revents)
            break;
        else
            for (int number = 0; number < num_hosts; number++)
                if (polled[number].revents & POLLIN) read_from(number);
    }
    printf("{\"frames\": %llu, \"wire_bytes\": %llu, \"lost\": %llu, \"late_s\": %.9f, \"most_late_s\": %.9f}\n",
           (unsigned long long)num_frames, (unsigned long long)num_wire_bytes, (unsigned long long)num_lost,
           num_frames ? (double)sum_late_ns / 1e9 / (double)num_frames : 0.0, (double)most_late_ns / 1e9);
    return 0;
}

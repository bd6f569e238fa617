//! The guest's network interface, over rtnetlink.
//!
//! The messages are built by pure functions; [`Link`] sends them one at a time and waits for the
//! kernel's answer. `include/uapi/linux/rtnetlink.h` is the reference.  Integers are in the
//! machine's byte order.

use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;

use forkd_proto::guest::Network;
use nix::libc;
use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, recv, send, socket,
};

const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const RTM_NEWLINK: u16 = 16;
const RTM_NEWADDR: u16 = 20;
const RTM_DELADDR: u16 = 21;
const RTM_GETADDR: u16 = 22;
const RTM_NEWROUTE: u16 = 24;

const REQUEST: u16 = 1;
const ACK: u16 = 4;
const REPLACE: u16 = 0x100;
const DUMP: u16 = 0x300;
const CREATE: u16 = 0x400;

const UNSPEC: u8 = 0;
const INET: u8 = 2;
const INET6: u8 = 10;
/// Of an address: nobody asks the link whether another has it.
const IFA_F_NODAD: u8 = 2;
const IFF_UP: u32 = 1;
const IFLA_ADDRESS: u16 = 1;
const IFA_ADDRESS: u16 = 1;
const IFA_LOCAL: u16 = 2;
const RTA_OIF: u16 = 4;
const RTA_GATEWAY: u16 = 5;

const HEADER_BYTES: usize = 16;
/// Most of an answer: a dump comes in parts that fit.
const ANSWER_MAX: usize = 8 << 10;

/// Where the kernel has its settings of IPv6, a folder for each interface.
const CONF_V6: &str = "/proc/sys/net/ipv6/conf";

/// What keeps the guest from learning of addresses and routes by itself: it has those that it is
/// given.
const QUIET: [(&str, &str); 5] = [
    ("accept_ra", "0"),
    ("autoconf", "0"),
    ("router_solicitations", "0"),
    ("accept_dad", "0"),
    // No address of the link alone: 1 is "none".
    ("addr_gen_mode", "1"),
];

/// How often the guest says which multicast groups it is in when its MAC or an address of IPv6
/// changes, as every fork's does (RFC 3810, 9.1): once, as nothing is lost on a link of two ends.
const REPORTS: (&str, &str) = ("/proc/sys/net/ipv6/mld_qrv", "1");

/// Brings the loopback interface up.
///
/// # Errors
///
/// The kernel refused.
pub fn loopback_up() -> io::Result<()> {
    Link::open()?.ask(&[set_link(index_of("lo")?, None)])
}

/// The guest's one network interface.
#[derive(Debug)]
pub struct Interface {
    index: u32,
    link: Link,
    /// Its addresses, as bodies fit for taking them away, if nobody but us can have added any since
    /// they were asked for.
    known: Option<Vec<Vec<u8>>>,
    /// Whether it could have an IPv6 address when they were asked for.
    ipv6: bool,
    name: String,
}

impl Interface {
    /// Brings the interface up without an address, once, before the snapshot: the driver then
    /// allocates its receive buffers, a page each, which no fork has to do any more.  It neither
    /// asks for IPv6 addresses and routers nor believes who tells of them.
    ///
    /// # Errors
    ///
    /// There is none (`NotFound`), or the kernel refused.
    pub fn prepare() -> io::Result<Self> {
        let name = interface_name()?.ok_or(io::ErrorKind::NotFound)?;
        quiet(&name)?;
        let (index, link) = (index_of(&name)?, Link::open()?);
        let mut interface = Self { index, link, known: None, ipv6: false, name };
        interface.link.ask(&[set_link(interface.index, None)])?;
        Ok(interface)
    }

    /// Notes which addresses the interface has, so that forks need not ask: what a guest adds by
    /// itself after its snapshot is part of what is forked, and no way out, since packets with it
    /// are dropped on the host.
    ///
    /// # Errors
    ///
    /// The kernel refused; forks will ask.
    pub fn note_addresses(&mut self) -> io::Result<()> {
        self.known = Some(self.link.addresses(self.index)?);
        self.ipv6 = has_ipv6(&self.name);
        Ok(())
    }

    /// Whether it has had no address when they were noted, and been given none since.
    pub fn has_no_address(&self) -> bool {
        self.known.as_ref().is_some_and(Vec::is_empty)
    }

    /// Whether an IPv6 address that it is given now would be its own, as far as was noted.
    pub fn can_ipv6(&self) -> bool {
        self.ipv6
    }

    /// Gives the interface its MAC, addresses and default routes, and takes away the addresses that
    /// it had.  Returns whether it has its IPv6 address: a kernel without IPv6, or one that is told
    /// not to use it, leaves the guest with IPv4.
    ///
    /// # Errors
    ///
    /// The kernel refused.
    pub fn configure(&mut self, network: &Network) -> io::Result<bool> {
        let bad = || io::Error::from(io::ErrorKind::InvalidInput);
        let (address, prefix) = network.address_and_prefix().ok_or_else(bad)?;
        let mac = network.mac_bytes().ok_or_else(bad)?;
        self.remove_addresses()?;
        let mut messages = vec![set_link(self.index, Some(mac))];
        let mut known = vec![address_body(self.index, address.into(), prefix)];
        messages.push(add_address(&known[0]));
        if let Some(gateway) = &network.gateway {
            let gateway: Ipv4Addr = gateway.parse().map_err(|_| bad())?;
            messages.push(add_default_route(self.index, gateway.into()));
        }
        self.link.ask(&messages)?;
        let ipv6 = match network.address_and_prefix_v6() {
            Some((address, prefix)) => {
                known.push(address_body(self.index, address.into(), prefix));
                self.configure_v6(&known[1], network.gateway_v6.as_deref())?
            }
            None => false,
        };
        known.truncate(1 + usize::from(ipv6));
        self.known = Some(known);
        Ok(ipv6)
    }

    /// One that the kernel does not know, and that has no address.
    #[cfg(test)]
    pub fn unknown() -> Self {
        let link = Link::open().unwrap();
        Self { index: i32::MAX as u32, link, known: Some(Vec::new()), ipv6: true, name: "?".into() }
    }

    fn configure_v6(&mut self, address: &[u8], gateway: Option<&str>) -> io::Result<bool> {
        let mut messages = vec![add_address(address)];
        if let Some(gateway) = gateway {
            let gateway: Ipv6Addr = gateway.parse().map_err(io::Error::other)?;
            messages.push(add_default_route(self.index, gateway.into()));
        }
        match self.link.ask(&messages) {
            Err(error) if means_no_ipv6(&error) => Ok(false),
            added => added.map(|()| true),
        }
    }

    /// Those that somebody has taken away already are fine.
    fn remove_addresses(&mut self) -> io::Result<()> {
        let old = match self.known.take() {
            Some(known) => known,
            None => self.link.addresses(self.index)?,
        };
        for body in old {
            match self.link.ask(&[message(RTM_DELADDR, 0, &body)]) {
                Err(error) if error.raw_os_error() == Some(libc::EADDRNOTAVAIL) => {}
                removed => removed?,
            }
        }
        Ok(())
    }
}

/// A kernel without IPv6 has nothing to quiet.
fn quiet(name: &str) -> io::Result<()> {
    let folder = Path::new(CONF_V6).join(name);
    if !folder.exists() {
        return Ok(());
    }
    fs::write(REPORTS.0, REPORTS.1)?;
    QUIET.iter().try_for_each(|(setting, value)| fs::write(folder.join(setting), value))
}

/// Whether the kernel has IPv6, and uses it on the interface.
fn has_ipv6(name: &str) -> bool {
    let file = Path::new(CONF_V6).join(name).join("disable_ipv6");
    fs::read_to_string(file).is_ok_and(|text| text.trim() == "0")
}

/// Whether an IPv6 address was refused because there is no IPv6: the kernel was built or started
/// without, or the interface has it disabled.
fn means_no_ipv6(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EAFNOSUPPORT | libc::EOPNOTSUPP | libc::EACCES))
}

/// The interface that has a device behind it (a bridge or a dummy of the image's has none); the
/// first by name, should there be several.
fn interface_name() -> io::Result<Option<String>> {
    let mut names: Vec<String> = fs::read_dir("/sys/class/net")?
        .filter_map(Result::ok)
        .filter(|entry| entry.path().join("device").exists())
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect();
    names.sort();
    Ok(names.into_iter().next())
}

fn index_of(name: &str) -> io::Result<u32> {
    let text = fs::read_to_string(format!("/sys/class/net/{name}/ifindex"))?;
    text.trim().parse().map_err(io::Error::other)
}

/// A socket for requests to the kernel.
#[derive(Debug)]
struct Link {
    socket: OwnedFd,
    sequence: u32,
}

impl Link {
    fn open() -> io::Result<Self> {
        let flags = SockFlag::SOCK_CLOEXEC;
        let protocol = SockProtocol::NetlinkRoute;
        let socket = socket(AddressFamily::Netlink, SockType::Raw, flags, protocol)?;
        Ok(Self { socket, sequence: 0 })
    }

    /// Sends messages at once, and waits until the kernel has done all of them; the first that it
    /// refused is the error.
    fn ask(&mut self, messages: &[Vec<u8>]) -> io::Result<()> {
        let last = self.send(messages)?;
        let mut outcome = Ok(());
        loop {
            let mut buffer = [0; ANSWER_MAX];
            let count = recv(self.socket.as_raw_fd(), &mut buffer, MsgFlags::empty())?;
            for answer in answers(buffer.get(..count).unwrap_or_default()) {
                if answer.kind != NLMSG_ERROR {
                    return Err(io::ErrorKind::InvalidData.into());
                }
                outcome = outcome.and(acknowledged(answer.body));
                if answer.sequence == last {
                    return outcome;
                }
            }
        }
    }

    /// The addresses of an interface, as bodies fit for taking them away.
    fn addresses(&mut self, index: u32) -> io::Result<Vec<Vec<u8>>> {
        let all = [UNSPEC, 0, 0, 0, 0, 0, 0, 0];
        self.send(&[message(RTM_GETADDR, DUMP, &all)])?;
        let mut found = Vec::new();
        loop {
            let mut buffer = [0; ANSWER_MAX];
            let count = recv(self.socket.as_raw_fd(), &mut buffer, MsgFlags::empty())?;
            for Answer { kind, body, .. } in answers(buffer.get(..count).unwrap_or_default()) {
                match kind {
                    NLMSG_DONE => return Ok(found),
                    NLMSG_ERROR => acknowledged(body)?,
                    RTM_NEWADDR if body.get(4..8) == Some(&index.to_ne_bytes()) => {
                        found.push(body.to_vec());
                    }
                    _ => {}
                }
            }
        }
    }

    /// Numbers messages and sends them; returns the number of the last, which alone is answered if
    /// nothing is wrong.
    fn send(&mut self, messages: &[Vec<u8>]) -> io::Result<u32> {
        let mut bytes = Vec::new();
        for (place, message) in messages.iter().enumerate() {
            self.sequence += 1;
            let flags = if place + 1 == messages.len() { REQUEST | ACK } else { REQUEST };
            bytes.extend(numbered(message, flags, self.sequence));
        }
        send(self.socket.as_raw_fd(), &bytes, MsgFlags::empty())?;
        Ok(self.sequence)
    }
}

/// Zero for success, else a negated error number.
fn acknowledged(body: &[u8]) -> io::Result<()> {
    let number = body.first_chunk::<4>().map(|bytes| i32::from_ne_bytes(*bytes));
    match number {
        Some(0) => Ok(()),
        Some(number) => Err(io::Error::from_raw_os_error(-number)),
        None => Err(io::ErrorKind::InvalidData.into()),
    }
}

/// A message of the kernel's.
#[derive(Debug)]
struct Answer<'a> {
    kind: u16,
    /// The number of what it answers.
    sequence: u32,
    body: &'a [u8],
}

/// Cuts what the kernel sent into messages.
fn answers(mut bytes: &[u8]) -> Vec<Answer<'_>> {
    let mut all = Vec::new();
    while let Some((header, _)) = bytes.split_first_chunk::<HEADER_BYTES>() {
        let [length, kind_and_flags, sequence, _] = words(*header);
        let Some(body) = bytes.get(HEADER_BYTES..length as usize) else { break };
        let [low, high, ..] = kind_and_flags.to_ne_bytes();
        all.push(Answer { kind: u16::from_ne_bytes([low, high]), sequence, body });
        bytes = bytes.get((length as usize).next_multiple_of(4)..).unwrap_or_default();
    }
    all
}

fn words(header: [u8; HEADER_BYTES]) -> [u32; HEADER_BYTES / 4] {
    let (words, _) = header.as_chunks();
    std::array::from_fn(|at| words.get(at).map_or(0, |word| u32::from_ne_bytes(*word)))
}

/// A request without a number, and without the flags that every request has.
fn message(kind: u16, flags: u16, body: &[u8]) -> Vec<u8> {
    let length = u32::try_from(HEADER_BYTES + body.len()).unwrap_or(0);
    let mut bytes = Vec::with_capacity(HEADER_BYTES + body.len());
    bytes.extend(length.to_ne_bytes());
    bytes.extend(kind.to_ne_bytes());
    bytes.extend(flags.to_ne_bytes());
    // Sequence number and port, which the sender and the kernel fill in.
    bytes.extend([0; 8]);
    bytes.extend(body);
    bytes
}

/// `message` with more flags and its number, padded so that another can follow.
fn numbered(message: &[u8], flags: u16, sequence: u32) -> Vec<u8> {
    let mut bytes = message.to_vec();
    if let Some([low, high, number @ ..]) = bytes.get_mut(6..12) {
        [*low, *high] = (u16::from_ne_bytes([*low, *high]) | flags).to_ne_bytes();
        number.copy_from_slice(&sequence.to_ne_bytes());
    }
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

fn attribute(kind: u16, value: &[u8], body: &mut Vec<u8>) {
    let length = u16::try_from(4 + value.len()).unwrap_or(0);
    body.extend(length.to_ne_bytes());
    body.extend(kind.to_ne_bytes());
    body.extend(value);
    body.resize(body.len().next_multiple_of(4), 0);
}

/// `struct ifinfomsg`: up, and perhaps another MAC.
fn set_link(index: u32, mac: Option<[u8; 6]>) -> Vec<u8> {
    let mut body = vec![0; 4];
    body.extend(index.to_ne_bytes());
    body.extend(IFF_UP.to_ne_bytes());
    body.extend(IFF_UP.to_ne_bytes());
    if let Some(mac) = mac {
        attribute(IFLA_ADDRESS, &mac, &mut body);
    }
    message(RTM_NEWLINK, 0, &body)
}

/// `struct ifaddrmsg`.
fn address_body(index: u32, address: IpAddr, prefix: u8) -> Vec<u8> {
    let (family, flags) = match address {
        IpAddr::V4(_) => (INET, 0),
        IpAddr::V6(_) => (INET6, IFA_F_NODAD),
    };
    let mut body = vec![family, prefix, flags, 0];
    body.extend(index.to_ne_bytes());
    attribute(IFA_LOCAL, &octets(address), &mut body);
    attribute(IFA_ADDRESS, &octets(address), &mut body);
    body
}

fn add_address(body: &[u8]) -> Vec<u8> {
    message(RTM_NEWADDR, CREATE | REPLACE, body)
}

/// `struct rtmsg`: everything, in the main table, set at boot, for anybody, by unicast.
fn add_default_route(index: u32, gateway: IpAddr) -> Vec<u8> {
    let family = if gateway.is_ipv4() { INET } else { INET6 };
    let mut body = vec![family, 0, 0, 0, 254, 3, 0, 1, 0, 0, 0, 0];
    attribute(RTA_OIF, &index.to_ne_bytes(), &mut body);
    attribute(RTA_GATEWAY, &octets(gateway), &mut body);
    message(RTM_NEWROUTE, CREATE | REPLACE, &body)
}

fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_carries_its_length_and_its_attributes_are_padded() {
        let bytes = set_link(7, Some([2, 0, 0, 0, 0, 1]));
        assert_eq!(bytes.len(), 16 + 16 + 12);
        assert_eq!(bytes.first_chunk::<4>(), Some(&44_u32.to_ne_bytes()));
        assert_eq!(&bytes[20..24], 7_u32.to_ne_bytes());
    }

    #[test]
    fn an_address_says_its_family_and_one_of_ipv6_is_not_asked_for_on_the_link() {
        let four = add_address(&address_body(7, Ipv4Addr::new(10, 0, 0, 2).into(), 30));
        assert_eq!((four.len(), &four[16..20]), (16 + 8 + 8 + 8, &[INET, 30, 0, 0][..]));
        let six = add_address(&address_body(7, Ipv6Addr::LOCALHOST.into(), 64));
        assert_eq!((six.len(), &six[16..20]), (16 + 8 + 20 + 20, &[INET6, 64, 2, 0][..]));
    }

    #[test]
    fn only_a_kernel_that_has_no_ipv6_leaves_a_guest_without() {
        for (number, expected) in [
            (libc::EAFNOSUPPORT, true),
            (libc::EOPNOTSUPP, true),
            (libc::EACCES, true),
            (libc::EEXIST, false),
            (libc::ENOMEM, false),
        ] {
            assert_eq!(means_no_ipv6(&io::Error::from_raw_os_error(number)), expected, "{number}");
        }
    }

    #[test]
    fn what_the_kernel_sends_is_cut_into_messages() {
        let mut bytes = numbered(&message(RTM_NEWADDR, 0, &[1, 2, 3, 4, 5]), REQUEST, 7);
        bytes.extend(numbered(&message(NLMSG_DONE, 0, &[0; 4]), REQUEST, 8));
        let found: Vec<_> =
            answers(&bytes).iter().map(|it| (it.kind, it.sequence, it.body.len())).collect();
        assert_eq!(found, [(RTM_NEWADDR, 7, 5), (NLMSG_DONE, 8, 4)]);
    }

    #[test]
    fn a_message_longer_than_what_came_is_not_believed() {
        let mut bytes = message(NLMSG_ERROR, 0, &[0; 4]);
        bytes[0] = 200;
        assert!(answers(&bytes).is_empty());
    }

    #[test]
    fn a_refusal_keeps_the_kernels_number() {
        let error = acknowledged(&(-libc::EPERM).to_ne_bytes()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
        assert!(acknowledged(&0_i32.to_ne_bytes()).is_ok());
        assert!(acknowledged(&[]).is_err());
    }
}

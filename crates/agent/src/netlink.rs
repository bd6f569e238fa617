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
const ANSWER_MAX: usize = 32 << 10;

/// What keeps the guest from learning of addresses and routes by itself, below
/// `/proc/sys/net/ipv6/conf`: it has those that it is given.
const QUIET: [(&str, &str); 5] = [
    ("accept_ra", "0"),
    ("autoconf", "0"),
    ("router_solicitations", "0"),
    ("accept_dad", "0"),
    // No address of the link alone: 1 is "none".
    ("addr_gen_mode", "1"),
];

/// Brings the loopback interface up.
///
/// # Errors
///
/// The kernel refused.
pub fn loopback_up() -> io::Result<()> {
    Link::open()?.ask(&set_link(index_of("lo")?, None))
}

/// Has the one network interface neither ask for IPv6 addresses and routers nor believe who tells
/// of them.  Done once, before the snapshot, so that it costs forks nothing.  A kernel without IPv6
/// has nothing to quiet, and an image without an interface neither.
///
/// # Errors
///
/// The kernel refused.
pub fn quiet() -> io::Result<()> {
    let Some(name) = interface_name()? else { return Ok(()) };
    let folder = Path::new("/proc/sys/net/ipv6/conf").join(name);
    if !folder.exists() {
        return Ok(());
    }
    QUIET.iter().try_for_each(|(setting, value)| fs::write(folder.join(setting), value))
}

/// Gives the one network interface its MAC, addresses and default routes, and takes away the
/// addresses that it had.  Returns whether it has its IPv6 address: a kernel without IPv6, or one
/// that is told not to use it, leaves the guest with IPv4.
///
/// # Errors
///
/// There is no interface (`NotFound`), or the kernel refused.
pub fn configure(network: &Network) -> io::Result<bool> {
    let bad = || io::Error::from(io::ErrorKind::InvalidInput);
    let (address, prefix) = network.address_and_prefix().ok_or_else(bad)?;
    let mac = network.mac_bytes().ok_or_else(bad)?;
    let index = interface()?;
    let mut link = Link::open()?;
    link.ask(&set_link(index, Some(mac)))?;
    for old in link.addresses(index)? {
        link.ask(&message(RTM_DELADDR, REQUEST | ACK, &old))?;
    }
    link.ask(&add_address(index, address.into(), prefix))?;
    if let Some(gateway) = &network.gateway {
        let gateway: Ipv4Addr = gateway.parse().map_err(|_| bad())?;
        link.ask(&add_default_route(index, gateway.into()))?;
    }
    let Some((address, prefix)) = network.address_and_prefix_v6() else { return Ok(false) };
    match link.ask(&add_address(index, address.into(), prefix)) {
        Err(error) if means_no_ipv6(&error) => return Ok(false),
        added => added?,
    }
    if let Some(gateway) = &network.gateway_v6 {
        let gateway: Ipv6Addr = gateway.parse().map_err(|_| bad())?;
        link.ask(&add_default_route(index, gateway.into()))?;
    }
    Ok(true)
}

/// Whether an IPv6 address was refused because there is no IPv6: the kernel was built or started
/// without, or the interface has it disabled.
fn means_no_ipv6(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EAFNOSUPPORT | libc::EOPNOTSUPP | libc::EACCES))
}

/// The interface that has a device behind it (a bridge or a dummy of the image's has none); the
/// first by name, should there be several.
fn interface() -> io::Result<u32> {
    let name = interface_name()?.ok_or(io::ErrorKind::NotFound)?;
    index_of(&name)
}

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

    /// Sends one message and waits for its acknowledgement.
    fn ask(&mut self, message: &[u8]) -> io::Result<()> {
        self.send(message)?;
        let mut buffer = vec![0; ANSWER_MAX];
        let count = recv(self.socket.as_raw_fd(), &mut buffer, MsgFlags::empty())?;
        for (kind, body) in messages(buffer.get(..count).unwrap_or_default()) {
            if kind == NLMSG_ERROR {
                return acknowledged(body);
            }
        }
        Err(io::ErrorKind::InvalidData.into())
    }

    /// The addresses of an interface, as bodies fit for taking them away.
    fn addresses(&mut self, index: u32) -> io::Result<Vec<Vec<u8>>> {
        let all = [UNSPEC, 0, 0, 0, 0, 0, 0, 0];
        self.send(&message(RTM_GETADDR, REQUEST | DUMP, &all))?;
        let mut found = Vec::new();
        loop {
            let mut buffer = vec![0; ANSWER_MAX];
            let count = recv(self.socket.as_raw_fd(), &mut buffer, MsgFlags::empty())?;
            for (kind, body) in messages(buffer.get(..count).unwrap_or_default()) {
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

    fn send(&mut self, message: &[u8]) -> io::Result<()> {
        self.sequence += 1;
        let mut numbered = message.to_vec();
        if let Some(place) = numbered.get_mut(8..12) {
            place.copy_from_slice(&self.sequence.to_ne_bytes());
        }
        send(self.socket.as_raw_fd(), &numbered, MsgFlags::empty())?;
        Ok(())
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

/// Cuts what the kernel sent into messages, each a kind and a body.
fn messages(mut bytes: &[u8]) -> Vec<(u16, &[u8])> {
    let mut all = Vec::new();
    while let Some((header, _)) = bytes.split_first_chunk::<HEADER_BYTES>() {
        let [a, b, c, d, kind_low, kind_high, ..] = *header;
        let length = usize::try_from(u32::from_ne_bytes([a, b, c, d])).unwrap_or(0);
        let Some(body) = bytes.get(HEADER_BYTES..length) else { break };
        all.push((u16::from_ne_bytes([kind_low, kind_high]), body));
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    all
}

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
    message(RTM_NEWLINK, REQUEST | ACK, &body)
}

/// `struct ifaddrmsg`.
fn add_address(index: u32, address: IpAddr, prefix: u8) -> Vec<u8> {
    let (family, flags) = match address {
        IpAddr::V4(_) => (INET, 0),
        IpAddr::V6(_) => (INET6, IFA_F_NODAD),
    };
    let mut body = vec![family, prefix, flags, 0];
    body.extend(index.to_ne_bytes());
    attribute(IFA_LOCAL, &octets(address), &mut body);
    attribute(IFA_ADDRESS, &octets(address), &mut body);
    message(RTM_NEWADDR, REQUEST | ACK | CREATE | REPLACE, &body)
}

/// `struct rtmsg`: everything, in the main table, set at boot, for anybody, by unicast.
fn add_default_route(index: u32, gateway: IpAddr) -> Vec<u8> {
    let family = if gateway.is_ipv4() { INET } else { INET6 };
    let mut body = vec![family, 0, 0, 0, 254, 3, 0, 1, 0, 0, 0, 0];
    attribute(RTA_OIF, &index.to_ne_bytes(), &mut body);
    attribute(RTA_GATEWAY, &octets(gateway), &mut body);
    message(RTM_NEWROUTE, REQUEST | ACK | CREATE | REPLACE, &body)
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
        let four = add_address(7, Ipv4Addr::new(10, 0, 0, 2).into(), 30);
        assert_eq!((four.len(), &four[16..20]), (16 + 8 + 8 + 8, &[INET, 30, 0, 0][..]));
        let six = add_address(7, Ipv6Addr::LOCALHOST.into(), 64);
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
        let mut bytes = message(RTM_NEWADDR, 0, &[1, 2, 3, 4, 5]);
        bytes.resize(24, 0);
        bytes.extend(message(NLMSG_DONE, 0, &[0; 4]));
        let kinds: Vec<_> =
            messages(&bytes).iter().map(|(kind, body)| (*kind, body.len())).collect();
        assert_eq!(kinds, [(RTM_NEWADDR, 5), (NLMSG_DONE, 4)]);
    }

    #[test]
    fn a_message_longer_than_what_came_is_not_believed() {
        let mut bytes = message(NLMSG_ERROR, 0, &[0; 4]);
        bytes[0] = 200;
        assert!(messages(&bytes).is_empty());
    }

    #[test]
    fn a_refusal_keeps_the_kernels_number() {
        let error = acknowledged(&(-libc::EPERM).to_ne_bytes()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
        assert!(acknowledged(&0_i32.to_ne_bytes()).is_ok());
        assert!(acknowledged(&[]).is_err());
    }
}

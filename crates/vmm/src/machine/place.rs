//! Where a machine's files go, and the poll loop that watches its sockets.

use std::path::PathBuf;
use std::sync::Arc;

use vmm_sys_util::epoll::Epoll;

/// Where a machine's files are, and who watches its sockets.
#[derive(Clone, Debug)]
pub struct Place {
    /// The machine's folder.
    pub directory: PathBuf,
    /// The poll loop's descriptor.
    pub epoll: Arc<Epoll>,
    /// What sets vsock tokens apart from others in that loop.
    pub vsock_tag: u64,
}

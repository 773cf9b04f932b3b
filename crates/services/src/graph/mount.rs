//! A new graph comes into force: upward, each service over those that are in force already.

use super::{Graph, GraphError};
use crate::service::{LegOrigin, Mount, Reason};

impl Graph {
    /// Brings a new graph into force.
    ///
    /// # Errors
    /// The service that cannot be; then none is.
    pub fn mount(&mut self, reason: Reason) -> Result<(), GraphError> {
        self.mount_all(reason, false)
    }

    /// The same of a stored volume, while others wait.
    ///
    /// # Errors
    /// Also [`GraphError::Unfinished`], where a service has an erasure to complete, which is not begun.
    pub fn mount_at_once(&mut self) -> Result<(), GraphError> {
        self.mount_all(Reason::Open, true)
    }

    fn mount_all(&mut self, reason: Reason, at_once: bool) -> Result<(), GraphError> {
        let nodes = self.nodes();
        let services: Vec<_> = nodes.iter().rev().filter_map(|node| Some((node, node.service.as_ref()?))).collect();
        for (at, (node, service)) in services.iter().enumerate() {
            let legs = vec![LegOrigin::Kept; node.legs.len()];
            let mount = Mount { reason, legs, previous: None, reformat: false };
            // What it is over is in force by now, and can be read.
            let mounted = if at_once && service.has_erasure() {
                Err(GraphError::Unfinished { node: node.name.clone() })
            } else {
                node.mount(&mount)
            };
            if let Err(error) = mounted {
                for (done, _) in services[..at].iter().rev() {
                    done.unmount();
                    if reason == Reason::Create {
                        done.discard(false);
                    }
                }
                return Err(error);
            }
        }
        self.start(&nodes);
        Ok(())
    }
}

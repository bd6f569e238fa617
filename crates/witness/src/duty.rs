//! What a worker does, whatever it keeps.

/// What one worker keeps.
pub trait Duty: Send {
    /// The number of the last step that is done.
    fn seq(&self) -> u64;

    /// Does one step.  Before it writes anything over it checks what is there, and says what was
    /// wrong with it.
    fn step(&mut self) -> Result<(), String>;

    /// Checks everything, between two steps.  Returns how many pages or blocks are right.
    fn check(&mut self) -> Result<u64, String>;

    /// Whether it keeps files.
    fn on_disk(&self) -> bool;
}
